#include "comm/group/group.h"
