#include <csignal>
#include <filesystem>
#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <lockstep/error.h>

#include "cli/commands.h"
#include "ui/find_runs.h"
#include "ui/server.h"

namespace lockstep::ui {
namespace {

constexpr int kFailure = 1, kWrongUsage = 2;

constexpr const char* kUiFooter = R"(
Serves a page with the curves, settings, results, ranks and checkpoints of all runs below the folders, and prints its
URL. The page follows runs that are still training. Only a browser with the token in the URL is answered. The command
reads files and changes nothing. Links below the folders are not followed. It runs until Ctrl-C.

To see the runs of another machine, forward the port with ssh: ssh -L 8080:127.0.0.1:8080 HOST lockstep ui --port 8080

The URL path /metrics has all runs and ranks in the format of OpenMetrics, for Prometheus.

Examples:
  lockstep ui
  lockstep ui runs other/runs
  lockstep ui runs --port 8080

Exit codes:
  0   ended by Ctrl-C or SIGTERM
  1   the address or the port cannot be used
  2   wrong usage, such as a folder that does not exist
)";

struct UiArguments {
  std::vector<std::string> folders{"runs"};
  std::string address = "127.0.0.1";
  int port = 0;
};

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

/// Blocks until SIGINT or SIGTERM arrives. All threads must have them blocked.
void wait_for_end(const sigset_t& signals) {
  int number = 0;
  while (sigwait(&signals, &number) != 0) {
  }
}

int serve(const UiArguments& arguments) {
  ServerOptions options{.address = arguments.address, .port = arguments.port};
  for (const auto& folder : arguments.folders) {
    if (!std::filesystem::is_directory(folder))
      throw UsageError(fmt::format("{} is no folder: name a folder with runs", folder));
    options.folders.emplace_back(folder);
  }
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // before any thread is started, so that all inherit it
  const Server server(options);
  if (!is_loopback(arguments.address))
    std::cerr << fmt::format(
        "lockstep ui: warning: {} can be reached from other machines, and the connection is not encrypted. Prefer ssh "
        "-L {}:127.0.0.1:{}.\n",
        arguments.address, server.port(), server.port());
  std::cout << server.url() << std::endl;
  std::cerr << "lockstep ui: open the URL in a browser; Ctrl-C ends the server" << std::endl;
  wait_for_end(signals);
  return 0;
}

int run_ui(const UiArguments& arguments) {
  const auto report = [](const std::string& message, int code) {
    std::cerr << "lockstep ui: " + message + "\n";
    return code;
  };
  try {
    return serve(arguments);
  } catch (const UsageError& error) {
    return report(error.what(), kWrongUsage);
  } catch (const std::exception& error) {
    return report(error.what(), kFailure);
  }
}

}  // namespace
}  // namespace lockstep::ui

void add_ui(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<lockstep::ui::UiArguments>();
  auto* command = app.add_subcommand("ui", "Show runs and their ranks in a browser, also while they train");
  command->add_option("folder", arguments->folders, "Folders of runs, or with runs below them")
      ->type_name("DIR")
      ->capture_default_str();
  command->add_option("--port", arguments->port, "The port (default: any free one)")
      ->type_name("N")
      ->check(CLI::Range(0, 65535));
  command->add_option("--address", arguments->address, "The address to listen on; others than loopback are not safe")
      ->type_name("ADDRESS")
      ->capture_default_str();
  command->footer(lockstep::ui::kUiFooter);
  command->callback([arguments, &exit_code] { exit_code = lockstep::ui::run_ui(*arguments); });
}
