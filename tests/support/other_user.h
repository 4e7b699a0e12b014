#pragma once

#include <grp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>

/// A user that is neither root nor the user who runs the tests.
constexpr uid_t kOtherUser = 54321;

/// Changes the calling process to kOtherUser. Call it in a child process that runs as root.
inline void become_other_user() {
  if (::setgroups(0, nullptr) != 0 || ::setresgid(kOtherUser, kOtherUser, kOtherUser) != 0 ||
      ::setresuid(kOtherUser, kOtherUser, kOtherUser) != 0)
    throw std::runtime_error("setresuid");
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a change of uid clears it
}

/// Creates a folder inside `folder` in which every user may create files, as in /tmp.
inline std::filesystem::path make_shared_folder(const std::filesystem::path& folder) {
  const auto shared = folder / "shared";
  if (::chmod(folder.c_str(), 0711) != 0 || ::mkdir(shared.c_str(), 0777) != 0 || ::chmod(shared.c_str(), 01777) != 0)
    throw std::runtime_error("cannot make " + shared.string());
  return shared;
}
