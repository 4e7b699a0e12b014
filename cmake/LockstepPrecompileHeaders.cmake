# lockstep_precompile_headers(TARGET...): compiles <lockstep/lockstep.h>, which includes <torch/torch.h>, once for all
# files of these targets, and not again when one of them is edited. The targets need the same options as the first one:
# GCC warns (-Winvalid-pch) and reads the headers again where they differ.
function(lockstep_precompile_headers first)
  target_precompile_headers(${first} PRIVATE <lockstep/lockstep.h>)
  foreach(target ${ARGN})
    target_precompile_headers(${target} REUSE_FROM ${first})
  endforeach()
endfunction()
