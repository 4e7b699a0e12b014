#include "optim/zero/shard_plan.h"
