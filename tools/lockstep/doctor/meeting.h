#pragma once

#include <string>

#include <lockstep/environment.h>

namespace lockstep::tool {

/// Where the ranks of a job that is started from this environment would meet.
struct Meeting {
  enum class Kind { kAddress, kFile, kUnknown };

  Kind kind = Kind::kAddress;
  std::string host{"127.0.0.1"};  // of kAddress: a name or an address, without brackets
  std::string host_source{};      // the variable or launcher that gave it; empty: nothing did
  int port = 0;                   // of kAddress
  std::string port_source{};      // the variable, or what it is derived from; empty: nothing gave it
  bool port_is_served = false;    // the launcher that set the variables listens on the port itself
  std::string file{};             // of kFile
  Environment job{};              // rank 0 of 1 where the variables make no sense
  std::string refusal{};          // of kUnknown: what is wrong with the variables
};

/// Pure: reads only what `lookup` answers. Never throws: what joining would refuse is kUnknown.
Meeting find_meeting(const Environment::Lookup& lookup);

/// Whether ranks run on other hosts too, as far as the variables tell.
bool spans_hosts(const Meeting& meeting);

}  // namespace lockstep::tool
