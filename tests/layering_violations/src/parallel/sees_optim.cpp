#include "optim/shard_plan.h"
