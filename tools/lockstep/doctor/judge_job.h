#pragma once

#include "doctor/finding.h"
#include "doctor/meeting.h"
#include "doctor/network.h"
#include "doctor/storage.h"

namespace lockstep::tool {

// Facts in, a finding out: pure, and tested with facts that are made up.

/// Whether the variables that a launcher sets make sense together.
Finding judge_job(const Meeting& meeting);

Finding judge_secret(const SecretFile& secret, const Meeting& meeting, const Network& network);

Finding judge_folder(const Folder& folder);

}  // namespace lockstep::tool
