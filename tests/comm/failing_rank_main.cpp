#include "comm/failing_rank.h"

int main(int, char** argv) {
  return run_failing_rank(argv[1]);
}
