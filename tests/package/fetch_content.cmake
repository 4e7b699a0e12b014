# Configures examples/11_fetch_content with this source tree, and with BUILD_IT builds and runs it. As a part of another
# project, lockstep builds no tests, tools, examples or benchmarks.

file(REMOVE ${WORK}/CMakeCache.txt)
if(BUILD_IT)  # from git, as it is committed
  set(where -D LOCKSTEP_TAG=HEAD)
else()
  set(where -D FETCHCONTENT_SOURCE_DIR_LOCKSTEP=${SOURCE})
endif()
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE}/examples/11_fetch_content -B ${WORK} -G Ninja
  -D Torch_DIR=${TORCH_DIR} ${where} COMMAND_ERROR_IS_FATAL ANY)
file(STRINGS ${WORK}/CMakeCache.txt guest REGEX "^LOCKSTEP_(TESTS|TOOLS|EXAMPLES|BENCHMARKS):BOOL=ON")
if(guest)
  message(FATAL_ERROR "as a part of another project, these should default to OFF: ${guest}")
endif()
if(BUILD_IT)
  execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK} COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${WORK}/fetch_content OUTPUT_VARIABLE printed COMMAND_ERROR_IS_FATAL ANY)
  if(NOT printed MATCHES "step 0  loss ([0-9.]+).*step 60  loss ([0-9.e-]+)\n$")
    message(FATAL_ERROR "unexpected output:\n${printed}")
  endif()
  if(NOT CMAKE_MATCH_2 LESS 1 OR NOT CMAKE_MATCH_1 GREATER 4)
    message(FATAL_ERROR "the loss does not fall:\n${printed}")
  endif()
endif()
