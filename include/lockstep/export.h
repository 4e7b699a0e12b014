#pragma once

// Marks the symbols that the shared libraries export. All other symbols are hidden.
#define LOCKSTEP_EXPORT __attribute__((visibility("default")))
