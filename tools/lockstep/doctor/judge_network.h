#pragma once

#include <optional>
#include <string>

#include "doctor/finding.h"
#include "doctor/meeting.h"
#include "doctor/network.h"

namespace lockstep::tool {

// Facts in, a finding out: pure, and tested with facts that are made up.

Finding judge_host_name(const Meeting& meeting, const Network& network);

// The others are about a meeting at an address; the last two, about one that a way leads to.

/// Whether the ranks find the way to where they meet.
Finding judge_meeting_address(const Meeting& meeting, const Network& network);

/// `named`: the value of LOCKSTEP_INTERFACE.
Finding judge_interface(const Meeting& meeting, const Network& network, const std::optional<std::string>& named);

Finding judge_port(const Meeting& meeting, const Network& network);

}  // namespace lockstep::tool
