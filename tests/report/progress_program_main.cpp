#include "report/progress_program.h"

int main(int argc, char** argv) {
  return run_progress_program({argv + 1, argv + argc});
}
