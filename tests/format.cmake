# Fails when a source is not formatted as .clang-format says. Versions of clang-format differ in their results, so this
# needs version 14.

cmake_minimum_required(VERSION 3.25)

find_program(clang_format NAMES clang-format-14 clang-format)
if(clang_format)
  execute_process(COMMAND ${clang_format} --version OUTPUT_VARIABLE version)
endif()
if(NOT version MATCHES "version 14\\.")
  message("could not run: format: clang-format 14 is not installed (apt-get install clang-format-14)")
  return()
endif()

file(GLOB_RECURSE files
  ${SOURCE}/include/*.h ${SOURCE}/src/*.h ${SOURCE}/src/*.cpp ${SOURCE}/tools/*.h ${SOURCE}/tools/*.cpp
  ${SOURCE}/tests/*.h ${SOURCE}/tests/*.cpp ${SOURCE}/examples/*.cpp ${SOURCE}/benchmarks/*.cpp)
if(NOT files)
  message(FATAL_ERROR "no sources in ${SOURCE}")
endif()
execute_process(COMMAND ${clang_format} --dry-run -Werror --ferror-limit=1 ${files} RESULT_VARIABLE result ERROR_VARIABLE errors)
if(result)
  message(FATAL_ERROR "${errors}\nRun ${clang_format} -i on the files above.")
endif()
