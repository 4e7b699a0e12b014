# Writes the C++ snippets of a page (PAGE) as one source (SOURCE): those of docs/models.md are in namespace models_page,
# behind the headers that they include. Compiler messages name the lines of the page.

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
string(REGEX MATCHALL "#include <[^\n]*\n" includes "${source}")
list(JOIN includes "" includes)
string(REGEX REPLACE "#include <[^\n]*" "" source "${source}")
get_filename_component(name ${PAGE} NAME_WE)
file(WRITE ${SOURCE} "${includes}namespace ${name}_page {\n${source}}  // namespace ${name}_page\n")
