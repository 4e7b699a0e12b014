# Writes the source OUTPUT with the files of the folder PAGE, so that lockstep needs no files when it runs.

cmake_minimum_required(VERSION 3.25)

set(types html text/html css text/css js text/javascript svg image/svg+xml)

file(GLOB files RELATIVE ${PAGE} ${PAGE}/*)
if(NOT files)
  message(FATAL_ERROR "no files in ${PAGE}")
endif()
list(SORT files)
set(arrays "")
set(table "")
set(number 0)
foreach(file ${files})
  string(REGEX REPLACE "^.*\\." "" extension ${file})
  list(FIND types ${extension} at)
  if(at LESS 0)
    message(FATAL_ERROR "${PAGE}/${file}: no content type is known for .${extension}")
  endif()
  math(EXPR at "${at} + 1")
  list(GET types ${at} type)
  file(READ ${PAGE}/${file} bytes HEX)
  string(LENGTH "${bytes}" digits)
  math(EXPR size "${digits} / 2")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "\\\\x\\1" bytes "${bytes}")
  string(REPEAT "(\\\\x..)?" 7 some)  # bytes of a line
  string(REGEX REPLACE "((\\\\x..)${some})" "\"\\1\"\n" bytes "${bytes}")
  string(APPEND arrays "constexpr char kFile${number}[] =\n${bytes};\n")
  string(APPEND table "    {\"/${file}\", \"${type}; charset=utf-8\", {kFile${number}, ${size}}},\n")
  math(EXPR number "${number} + 1")
endforeach()

file(WRITE ${OUTPUT} "// Written by embed_page.cmake.
#include \"ui/page_files.h\"

namespace lockstep::ui {
namespace {

${arrays}
constexpr PageFile kFiles[] = {
${table}};

}  // namespace

std::span<const PageFile> page_files() {
  return kFiles;
}

}  // namespace lockstep::ui
")
