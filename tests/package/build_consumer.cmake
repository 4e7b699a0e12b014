# Builds and runs the consumer against the installed package or against the source tree (WAY); with CONFIGURE_ONLY it stops
# before building. What it compiled is kept for the next run; what it found is not, so that a package we forgot to look for
# cannot hide in a cache.

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed with ${result}: ${ARGN}")
  endif()
endfunction()

set(build ${WORK}/${WAY})
if(WAY STREQUAL "installed")
  run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
  foreach(file man/man1/lockstep.1 man/man1/lockstep-run.1 bash-completion/completions/lockstep
          zsh/site-functions/_lockstep)
    if(NOT EXISTS ${WORK}/prefix/share/${file})
      message(FATAL_ERROR "not installed: share/${file}")
    endif()
  endforeach()
  set(where -D CMAKE_PREFIX_PATH=${WORK}/prefix)
else()
  set(where -D LOCKSTEP_SOURCE=${SOURCE})
endif()
file(REMOVE ${build}/CMakeCache.txt)
# No build type: what is proven here is not speed, and code that is not optimized is soon built.
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/consumer -B ${build} -G Ninja -D Torch_DIR=${TORCH_DIR} ${where})
if(NOT CONFIGURE_ONLY)
  run(${CMAKE_COMMAND} --build ${build})
  run(${build}/consumer)
endif()

# The README's first program and its CMakeLists.txt are built as they stand there.
if(WAY STREQUAL "installed")
  file(READ ${SOURCE}/README.md readme)
  if(NOT readme MATCHES "```cpp\n([^`]*)```")
    message(FATAL_ERROR "README.md has no program")
  endif()
  file(CONFIGURE OUTPUT ${WORK}/readme/hello.cpp CONTENT "${CMAKE_MATCH_1}" @ONLY)
  if(NOT readme MATCHES "```cmake\n([^`]*)```")
    message(FATAL_ERROR "README.md has no CMakeLists.txt")
  endif()
  file(CONFIGURE OUTPUT ${WORK}/readme/CMakeLists.txt CONTENT "${CMAKE_MATCH_1}" @ONLY)
  run(${CMAKE_COMMAND} -S ${WORK}/readme -B ${WORK}/readme/build -G Ninja ${where})
  run(${CMAKE_COMMAND} --build ${WORK}/readme/build)
  execute_process(COMMAND ${WORK}/prefix/bin/lockstep run -n 2 ${WORK}/readme/build/hello
    OUTPUT_VARIABLE printed RESULT_VARIABLE result)
  string(REGEX MATCHALL "\\[0\\]  3\n" threes "${printed}")
  list(LENGTH threes count)
  if(NOT result EQUAL 0 OR NOT count EQUAL 4)
    message(FATAL_ERROR "the README's program ended with ${result} and printed:\n${printed}")
  endif()
endif()

# A guest in another project builds no tests, examples or benchmarks.
file(STRINGS ${build}/CMakeCache.txt guest REGEX "^LOCKSTEP_(TESTS|EXAMPLES|BENCHMARKS):BOOL=ON")
if(guest)
  message(FATAL_ERROR "as a subdirectory, these should default to OFF: ${guest}")
endif()
