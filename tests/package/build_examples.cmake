# Installs lockstep and builds, as a user would: the first example, the README's program, and a program by pkg-config.
# The test build_all_examples builds the other examples in the same folder. Objects are kept for the next run; what
# CMake found is not, so that a package we forgot to look for cannot hide in a cache.

# expect_output(PATTERN COMMAND...): runs it; its output must match.
function(expect_output pattern)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE printed RESULT_VARIABLE result)
  if(NOT result EQUAL 0 OR NOT printed MATCHES "${pattern}")
    message(FATAL_ERROR "${ARGN} ended with ${result} and printed:\n${printed}")
  endif()
endfunction()

set(prefix ${WORK}/prefix)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix} COMMAND_ERROR_IS_FATAL ANY)
foreach(file man/man1/lockstep.1 man/man1/lockstep-run.1 bash-completion/completions/lockstep
        zsh/site-functions/_lockstep)
  if(NOT EXISTS ${prefix}/share/${file})
    message(FATAL_ERROR "not installed: share/${file}")
  endif()
endforeach()

# No build type: what is proven here is not speed, and code that is not optimized is soon built.
function(build_project source build target)
  file(REMOVE ${build}/CMakeCache.txt)
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${source} -B ${build} -G Ninja -D Torch_DIR=${TORCH_DIR}
    -D CMAKE_PREFIX_PATH=${prefix} -D CMAKE_CXX_FLAGS=-Wall\ -Wextra\ -Werror\ -Wno-array-bounds
    COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${CMAKE_COMMAND} --build ${build} --target ${target} COMMAND_ERROR_IS_FATAL ANY)
endfunction()
build_project(${SOURCE}/examples ${WORK}/examples hello)
expect_output("\\[0\\] sum 6\n\\[0\\]  6\n.*\\[0\\] mean 2\n\\[0\\]  2\n"
  ${prefix}/bin/lockstep run -n 3 ${WORK}/examples/hello)

# As they stand in the README.
file(READ ${SOURCE}/README.md readme)
foreach(block cpp:train.cpp cmake:CMakeLists.txt)
  string(REPLACE : ";" block ${block})
  list(GET block 0 language)
  list(GET block 1 file)
  if(NOT readme MATCHES "```${language}\n([^`]*)```")
    message(FATAL_ERROR "README.md has no ${file}")
  endif()
  file(CONFIGURE OUTPUT ${WORK}/readme/${file} CONTENT "${CMAKE_MATCH_1}" @ONLY)
endforeach()
build_project(${WORK}/readme ${WORK}/readme/build train)
expect_output("^\\[0\\] epoch 1  loss 0[.][0-9]+\n.*\n\\[0\\] epoch 5  loss 0[.]0[0-9]+\n$"
  ${prefix}/bin/lockstep run -n 2 ${WORK}/readme/build/train)

find_program(PKG_CONFIG pkg-config)
if(NOT PKG_CONFIG)
  execute_process(COMMAND ${CMAKE_COMMAND} -E echo "could not run: a program by pkg-config: there is no pkg-config")
  return()
endif()
file(GLOB_RECURSE pc ${prefix}/*/lockstep.pc)
get_filename_component(folder ${pc} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${folder})
execute_process(COMMAND ${PKG_CONFIG} --cflags --libs lockstep OUTPUT_VARIABLE flags COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
execute_process(COMMAND ${CXX} -std=c++20 ${CMAKE_CURRENT_LIST_DIR}/pkg_config.cpp -o ${WORK}/pkg_config ${flags}
  COMMAND_ERROR_IS_FATAL ANY)
expect_output("^\\[0\\] 2 ranks, 2, caught\n$" ${prefix}/bin/lockstep run -n 2 ${WORK}/pkg_config)
