#pragma once

#include <grp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>

/// A user who is neither root nor the one who runs the tests.
constexpr uid_t kOtherUser = 54321;

/// In a child process of root's: it goes on as that user.
inline void become_other_user() {
  if (::setgroups(0, nullptr) != 0 || ::setresgid(kOtherUser, kOtherUser, kOtherUser) != 0 ||
      ::setresuid(kOtherUser, kOtherUser, kOtherUser) != 0)
    throw std::runtime_error("setresuid");
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // which another uid has cleared
}

/// A folder inside of `folder` in which every user may create files, as in /tmp.
inline std::filesystem::path make_shared_folder(const std::filesystem::path& folder) {
  const auto shared = folder / "shared";
  if (::chmod(folder.c_str(), 0711) != 0 || ::mkdir(shared.c_str(), 0777) != 0 || ::chmod(shared.c_str(), 01777) != 0)
    throw std::runtime_error("cannot make " + shared.string());
  return shared;
}
