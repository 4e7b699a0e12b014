#pragma once

#include <span>
#include <string_view>

namespace lockstep::ui {

/// A file of the page, which is part of the program.
struct PageFile {
  std::string_view path, content_type, content;
};

/// All files of tools/lockstep/ui/page. The source is written by embed_page.cmake.
std::span<const PageFile> page_files();

}  // namespace lockstep::ui
