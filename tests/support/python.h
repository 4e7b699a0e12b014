#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/rank_process.h"

/// Standard input and output of a script.
struct ScriptStreams {
  std::string in = "/dev/null";
  std::string out = "/dev/stderr";
};

/// Runs a script below tests/ with this interpreter, and returns its exit code; if that is not 0, the test fails with
/// what the script printed. Python imports torch once for all scripts of a test program, because that takes seconds:
/// each script runs in a fork of python_server.py. Arguments must not contain tabs.
inline int run_python(const std::string& python, const std::string& script, const std::vector<std::string>& arguments,
                      const ScriptStreams& streams = {}) {
  // Never destroyed: exit() in a forked child of the test must not end the server. It ends with the test's process.
  static auto& servers = *new std::map<std::string, std::unique_ptr<RankProcess>>;
  auto& server = servers[python];
  if (!server)
    server = std::make_unique<RankProcess>(
        std::vector<std::string>{python, LOCKSTEP_TEST_SOURCE_DIR "/support/python_server.py"},
        std::map<std::string, std::string>{{"OMP_NUM_THREADS", "1"}});
  std::string line = streams.in + "\t" + streams.out + "\t" LOCKSTEP_TEST_SOURCE_DIR "/" + script;
  for (const auto& argument : arguments) line += "\t" + argument;
  const auto before = server->output().size();
  server->say(line);
  const auto answer = server->expect_line("exited ", std::chrono::minutes(5));
  const int code = answer.empty() ? -1 : std::stoi(answer.substr(answer.find(' ')));
  if (code != 0) ADD_FAILURE() << script << " ended with " << code << ":\n" << server->output().substr(before);
  if (answer.empty()) server.reset();
  return code;
}
