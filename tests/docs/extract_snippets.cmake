# Writes the C++ snippets of a page (PAGE) as one source (SOURCE). Compiler messages name the lines of the page.

cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/read_snippets.cmake)

read_snippets(${PAGE})
if(snippet_count EQUAL 0)
  message(FATAL_ERROR "${PAGE} has no snippets")
endif()
set(source "")
foreach(i RANGE 1 ${snippet_count})
  string(APPEND source "#line ${snippet_${i}_line} \"${PAGE}\"\n${snippet_${i}_text}\n")
endforeach()
file(WRITE ${SOURCE} "${source}")
