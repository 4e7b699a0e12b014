#include <torch/nn/module.h>
