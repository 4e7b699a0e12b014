#include <lockstep/detail/ddp_state.h>
