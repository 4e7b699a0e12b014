#include "rendezvous/net/port_owner.h"

#include <dirent.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <vector>

#include "base/text.h"

// /proc/net/tcp and tcp6 list all sockets with their inodes. /proc/PID/fd lists the open files of a process; a socket
// is a link "socket:[inode]".

namespace lockstep {
namespace {

/// Formats the address as in /proc/net/tcp: 32-bit words in host byte order.
std::string in_hex(const Address& address) {
  uint32_t words[4];
  size_t count = 1;
  if (address.family() == AF_INET6) {
    count = 4;
    std::memcpy(words, &reinterpret_cast<const sockaddr_in6*>(address.get())->sin6_addr, sizeof words);
  } else {
    std::memcpy(words, &reinterpret_cast<const sockaddr_in*>(address.get())->sin_addr, sizeof words[0]);
  }
  std::string hex;
  for (size_t i = 0; i < count; ++i) {
    char word[9];
    std::snprintf(word, sizeof word, "%08X", words[i]);
    hex += word;
  }
  return hex;
}

bool is_any(const std::string& hex) {
  return hex.find_first_not_of('0') == hex.npos;
}

/// Compares suffixes, because an IPv4-mapped IPv6 address ends with the IPv4 address.
bool collide(const std::string& hex, const std::string& other) {
  return is_any(hex) || is_any(other) || hex.ends_with(other) || other.ends_with(hex);
}

/// Returns the links "socket:[inode]" of the sockets that collide with `address`: listening ones if any, else all.
std::set<std::string> colliding_sockets(const Address& address) {
  constexpr const char* kListens = "0A";
  const std::string hex = in_hex(address);
  char port[5];
  std::snprintf(port, sizeof port, "%04X", static_cast<unsigned>(address.port()) & 0xffffu);
  std::set<std::string> listening, others;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(table);
    std::string line;
    while (std::getline(lines, line)) {
      std::string slot, local, remote, state, queues, timer, retransmits, user, timeout, inode;
      std::istringstream(line) >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> user >>
          timeout >> inode;
      const auto colon = local.find(':');
      if (colon == local.npos || local.substr(colon + 1) != port || !collide(local.substr(0, colon), hex)) continue;
      if (inode == "0") continue;  // closed by its process
      (state == kListens ? listening : others).insert(text("socket:[", inode, "]"));
    }
  }
  return listening.empty() ? others : listening;
}

std::vector<std::string> entries(const std::string& folder) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(folder.c_str()), &::closedir);
  if (!open) return names;
  while (const dirent* entry = ::readdir(open.get())) names.emplace_back(entry->d_name);
  return names;
}

bool has_open(const std::string& process, const std::set<std::string>& sockets) {
  const std::string folder = text("/proc/", process, "/fd");
  for (const auto& file : entries(folder)) {
    char target[64];
    const ssize_t length = ::readlink(text(folder, "/", file).c_str(), target, sizeof target);
    if (length > 0 && sockets.contains(std::string(target, static_cast<size_t>(length)))) return true;
  }
  return false;
}

}  // namespace

std::string port_owner(const Address& address) {
  const auto sockets = colliding_sockets(address);
  if (sockets.empty()) return "";
  for (const auto& process : entries("/proc")) {
    if (!parse_number<int>(process) || !has_open(process, sockets)) continue;
    std::string name;
    std::ifstream comm(text("/proc/", process, "/comm"));
    std::getline(comm, name);
    return text("pid ", process, " (", name, ")");
  }
  return "";
}

}  // namespace lockstep
