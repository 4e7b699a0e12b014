#include "ranks/test_ranks.h"

int main(int argc, char** argv) {
  return run_test_rank({argv + 1, argv + argc});
}
