#include <fstream>
#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include <lockstep/version.h>

#include "cli/commands.h"
#include "cli/man_page.h"

namespace lockstep::tool {
namespace {

bool write_page(const Manual& manual, const std::string& folder) {
  const auto path = folder + "/" + page_name(manual) + ".1";
  std::ofstream file(path);
  file << man_page(manual, LOCKSTEP_VERSION_STRING) << std::flush;
  if (!file) std::cerr << "lockstep: " << path << " cannot be written: is " << folder << " a folder you may write?\n";
  return static_cast<bool>(file);
}

bool write_pages(const Manual& lockstep, const std::string& folder) {
  bool is_written = write_page(lockstep, folder);
  for (const auto& command : lockstep.commands) is_written = is_written && write_page(command, folder);
  return is_written;
}

}  // namespace
}  // namespace lockstep::tool

void add_man(CLI::App& app, int& exit_code) {
  auto folder = std::make_shared<std::string>();
  auto* command = app.add_subcommand("man", "Write the man pages, for the build")->group("");
  command->add_option("folder", *folder, "Where to")->required()->type_name("DIR");
  command->callback([folder, &app, &exit_code] {
    using namespace lockstep::tool;
    exit_code = write_pages(read_manual(app), *folder) ? 0 : 1;
  });
}
