// Snippets that are whole programs. They are compiled here; other tests build them as users do, and run them.

#include "fragments.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wreturn-type"  // main returns 0 without a return statement

#define main readme_main
#include "README/a_training_program.inc"
#undef main

#define main first_main
#include "docs/getting_started/3_the_first_program.inc"
#undef main

#define main training_main
#include "docs/getting_started/4_train_a_network.inc"
#undef main

#pragma GCC diagnostic pop
