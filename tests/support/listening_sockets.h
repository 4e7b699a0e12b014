#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace lockstep {

/// Returns the TCP ports on which a process listens at 127.0.0.1. Any user can read them from /proc/net/tcp; `pid` only
/// excludes the ports of other jobs on this machine.
inline std::set<int> listening_ports(int pid) {
  constexpr const char* kLoopback = "0100007F";
  constexpr const char* kListens = "0A";
  std::set<std::string> sockets;
  std::error_code gone;
  for (const auto& file : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd", gone))
    sockets.insert(std::filesystem::read_symlink(file, gone).string());
  std::set<int> ports;
  std::ifstream table("/proc/net/tcp");
  std::string line;
  std::getline(table, line);  // the titles
  while (std::getline(table, line)) {
    std::string slot, local, remote, state, queues, timer, retransmits, user, timeout, inode;
    std::istringstream(line) >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> user >> timeout >>
        inode;
    if (state != kListens) break;  // listeners come first; the connections after them can be tens of thousands
    if (local.starts_with(kLoopback) && sockets.contains("socket:[" + inode + "]"))
      ports.insert(std::stoi(local.substr(local.find(':') + 1), nullptr, 16));
  }
  return ports;
}

}  // namespace lockstep
