#include "rendezvous/net/secret.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <vector>

#include <lockstep/error.h>

#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

const std::string kBytes = "0123456789abcdef0123456789abcdef";

Environment::Lookup variables(std::map<std::string, std::string> values) {
  return [values](const std::string& variable) -> std::optional<std::string> {
    auto found = values.find(variable);
    if (found == values.end()) return std::nullopt;
    return found->second;
  };
}

std::string in_hex(const std::string& bytes) {
  std::string hex;
  for (const unsigned char byte : bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    hex += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return hex;
}

mode_t mode_of(const fs::path& path) {
  struct stat status {};
  EXPECT_EQ(::lstat(path.c_str(), &status), 0) << path;
  return status.st_mode & 07777;
}

std::string contents_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return (std::ostringstream() << file.rdbuf()).str();
}

/// A folder with files of chosen bytes and modes.
class Secrets : public testing::Test {
 protected:
  std::string file(const std::string& bytes, mode_t mode) {
    const auto path = folder_.path() / "file";
    std::ofstream(path, std::ios::binary) << bytes;
    EXPECT_EQ(::chmod(path.c_str(), mode), 0);
    return path;
  }

  std::string path(const std::string& name) const { return folder_.path() / name; }
  std::string own_temporary() const { return path("lockstep-" + std::to_string(::geteuid())); }

  TemporaryFolder folder_;
};

TEST(Secret, IsFreshEachTime) {
  std::set<std::string> seen;
  for (int i = 0; i < 20; ++i) seen.insert(Secret::random().bytes());
  EXPECT_EQ(seen.size(), 20u);
  for (const auto& bytes : seen) EXPECT_EQ(bytes.size(), 32u);
}

TEST(Secret, HasAtLeast32Bytes) {
  EXPECT_EQ(Secret::from_bytes(kBytes).bytes(), kBytes);
  expect_error<UsageError>([] { Secret::from_bytes(kBytes.substr(1)); }, "31 bytes", "at least 32");
}

TEST(Secret, ReplacesAnother) {
  auto secret = Secret::random();
  secret = Secret::from_bytes(kBytes);
  const Secret copy = secret;
  EXPECT_EQ(copy.bytes(), kBytes);
  EXPECT_EQ(secret.bytes(), kBytes);
}

// The expected value comes from Python's hmac.
TEST(Secret, MakesAnHmac) {
  EXPECT_EQ(in_hex(Secret::from_bytes(kBytes).hmac(std::string("a message\0of bytes", 18))),
            "6e1e9c2445e8843b4ef4b15a801f32b830934b226d27ee9996ed704674de0999");
}

// The expected keys come from Python's hmac and hashlib, by RFC 5869 with an empty salt.
TEST(Secret, GivesTheKeysOfHkdfSha256) {
  std::string counting;
  for (char byte = 0; byte < 32; ++byte) counting += byte;
  const auto secret = Secret::from_bytes(counting);
  EXPECT_EQ(in_hex(secret.key(0).bytes()), "b879e8eab2a8768ee7890294772506237812f09e0a510e7caa49d16e9b8412d9");
  EXPECT_EQ(in_hex(secret.key(1).bytes()), "0b865a605ae6de646bfc5cc3be4b99f45ae8ca17d14bdb0291b437c90a91b097");
  EXPECT_EQ(in_hex(Secret::from_bytes("a secret of more than 32 bytes, with a newline\n").key(12).bytes()),
            "5a31e9f951eb5b3d30596491dfef364d2b376064b1968039fc43894b786a1d5f");
  EXPECT_EQ(secret.bytes(), counting);
}

TEST_F(Secrets, AreTheWholeFile) {
  const std::string bytes = kBytes + std::string("\0more\r\n\n", 8);
  EXPECT_EQ(Secret::from_file(file(bytes, 0600)).bytes(), bytes);
  EXPECT_EQ(Secret::from_file(file(kBytes, 0400)).bytes(), kBytes);
}

TEST_F(Secrets, ComeThroughALinkAsKubernetesMountsThem) {
  fs::create_symlink(file(kBytes, 0600), path("link"));
  EXPECT_EQ(Secret::from_file(path("link")).bytes(), kBytes);
}

TEST_F(Secrets, AreRefusedWhenOthersCanUseTheFile) {
  for (const mode_t mode : {0640, 0620, 0610, 0604, 0602, 0601, 0777}) {
    const auto shared = file(kBytes, mode);
    expect_error<UsageError>([&] { Secret::from_file(shared); }, shared,
                             "mode 0" + (std::ostringstream() << std::oct << mode).str(), "chmod 600 " + shared);
  }
}

TEST_F(Secrets, AreRefusedWhenTheyAreTooShort) {
  const auto shorter = file(kBytes.substr(1), 0600);
  expect_error<UsageError>([&] { Secret::from_file(shorter); }, shorter, "31 bytes", "at least 32", "/dev/urandom");
}

TEST_F(Secrets, AreRefusedWhenTheyAreNoFile) {
  expect_error<UsageError>([&] { Secret::from_file(path("none")); }, path("none"), "No such file",
                           "LOCKSTEP_SECRET_FILE", "umask 077");
  ASSERT_EQ(::mkdir(path("folder").c_str(), 0700), 0);
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  for (const std::string name : {"folder", "pipe"})
    expect_error<UsageError>([&] { Secret::from_file(path(name)); }, path(name), "not a regular file");
}

TEST_F(Secrets, AreRefusedFromAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  const auto given = file(kBytes, 0600);
  ASSERT_EQ(::chown(given.c_str(), 54321, static_cast<gid_t>(-1)), 0);
  expect_error<UsageError>([&] { Secret::from_file(given); }, given, "user 54321", "this user (0)");
}

TEST_F(Secrets, AreNeverInMessages) {
  for (const mode_t mode : {0600, 0644}) {
    const auto bad = file(mode == 0600 ? kBytes.substr(1) : kBytes, mode);
    try {
      Secret::from_file(bad);
      ADD_FAILURE() << "accepted";
    } catch (const UsageError& error) {
      EXPECT_EQ(std::string(error.what()).find(kBytes.substr(1, 8)), std::string::npos) << error.what();
    }
  }
}

TEST_F(Secrets, OfAJobAreInTheFileThatTheVariableNames) {
  const auto lookup = variables({{"LOCKSTEP_SECRET_FILE", file(kBytes, 0600)}, {"HOME", path("home")}});
  EXPECT_EQ(find_secret(true, lookup).bytes(), kBytes);
  EXPECT_EQ(find_secret(false, lookup).bytes(), kBytes);
  EXPECT_FALSE(fs::exists(path("home")));
  expect_error<UsageError>(
      [] {
        find_secret(true, variables({{"LOCKSTEP_SECRET_FILE", ""}}));
      },
      "LOCKSTEP_SECRET_FILE is \"\"");
}

TEST_F(Secrets, BeyondLoopbackAreNotMadeUp) {
  expect_error<UsageError>(
      [&] {
        find_secret(false, variables({{"HOME", path("home")}}));
      },
      "LOCKSTEP_SECRET_FILE is not set", "other hosts", "lockstep run", "/dev/urandom");
  EXPECT_FALSE(fs::exists(path("home")));
}

TEST_F(Secrets, OnLoopbackAreTheUsersOwnAndStay) {
  const auto lookup = variables({{"XDG_STATE_HOME", path("deep/state")}, {"HOME", path("home")}});
  const mode_t before = ::umask(0);
  const auto bytes = find_secret(true, lookup).bytes();
  ::umask(before);
  EXPECT_EQ(bytes.size(), 32u);
  EXPECT_EQ(find_secret(true, lookup).bytes(), bytes);
  EXPECT_EQ(contents_of(path("deep/state/lockstep/secret")), bytes);
  EXPECT_EQ(mode_of(path("deep/state/lockstep/secret")), 0600u);
  for (const std::string created : {"deep", "deep/state", "deep/state/lockstep"})
    EXPECT_EQ(mode_of(path(created)), 0700u) << created;
  EXPECT_FALSE(fs::exists(path("home")));
}

TEST_F(Secrets, OnLoopbackAreInTheFirstFolderThatIsGiven) {
  const auto home = find_secret(true, variables({{"HOME", path("home")}, {"TMPDIR", path("t")}})).bytes();
  EXPECT_EQ(contents_of(path("home/.local/state/lockstep/secret")), home);
  const auto relative = find_secret(true, variables({{"XDG_STATE_HOME", "state"}, {"HOME", path("home")}})).bytes();
  EXPECT_EQ(relative, home);
  const auto lookup = variables({{"XDG_STATE_HOME", ""}, {"HOME", ""}, {"TMPDIR", folder_.path()}});
  const auto temporary = find_secret(true, lookup).bytes();
  EXPECT_EQ(contents_of(own_temporary() + "/secret"), temporary);
}

TEST_F(Secrets, OnLoopbackAreNotTakenFromAFolderThatOthersMayWrite) {
  const auto lookup = variables({{"TMPDIR", folder_.path()}});
  ASSERT_EQ(::mkdir(own_temporary().c_str(), 0700), 0);
  ASSERT_EQ(::chmod(own_temporary().c_str(), 0770), 0);
  expect_error<UsageError>([&] { find_secret(true, lookup); }, own_temporary(), "mode 0770",
                           "chmod 700 " + own_temporary());
  EXPECT_TRUE(fs::is_empty(own_temporary()));
}

TEST_F(Secrets, OnLoopbackAreNotTakenThroughALinkedFolder) {
  const auto lookup = variables({{"TMPDIR", folder_.path()}});
  ASSERT_EQ(::mkdir(path("elsewhere").c_str(), 0700), 0);
  fs::create_directory_symlink(path("elsewhere"), own_temporary());
  expect_error<UsageError>([&] { find_secret(true, lookup); }, own_temporary(), "LOCKSTEP_SECRET_FILE");
  EXPECT_TRUE(fs::is_empty(path("elsewhere")));
}

TEST_F(Secrets, OnLoopbackAreNotTakenThroughALinkedFile) {
  const auto lookup = variables({{"TMPDIR", folder_.path()}});
  ASSERT_EQ(::mkdir(own_temporary().c_str(), 0700), 0);
  fs::create_symlink(file(kBytes, 0600), own_temporary() + "/secret");
  expect_error<SystemError>([&] { find_secret(true, lookup); }, own_temporary() + "/secret", "LOCKSTEP_SECRET_FILE");
}

TEST_F(Secrets, OnLoopbackAreNotTakenFromAnotherUsersFolder) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  ASSERT_EQ(::mkdir(own_temporary().c_str(), 0700), 0);
  ASSERT_EQ(::chown(own_temporary().c_str(), 54321, static_cast<gid_t>(-1)), 0);
  expect_error<UsageError>(
      [&] {
        find_secret(true, variables({{"TMPDIR", folder_.path()}}));
      },
      own_temporary(), "user 54321");
}

TEST_F(Secrets, OnLoopbackSayWhereTheyCannotBeWritten) {
  file("", 0600);
  expect_error<SystemError>(
      [&] {
        find_secret(true, variables({{"XDG_STATE_HOME", path("file")}}));
      },
      path("file/lockstep"), "Not a directory", "LOCKSTEP_SECRET_FILE");
}

TEST_F(Secrets, OnLoopbackSurviveAProcessThatDiedWhileItMadeOne) {
  const auto lookup = variables({{"TMPDIR", folder_.path()}});
  ASSERT_EQ(::mkdir(own_temporary().c_str(), 0700), 0);
  std::ofstream(own_temporary() + "/secret." + std::to_string(::getpid()) + ".0") << "unfinished";
  EXPECT_EQ(find_secret(true, lookup).bytes().size(), 32u);
}

TEST_F(Secrets, OfKilledProcessesAreRemovedByTheNextFolder) {
  const char* before = std::getenv("TMPDIR");
  const std::string restored = before ? before : "";
  ::setenv("TMPDIR", folder_.path().c_str(), 1);
  const auto make = [&](const std::string& name, std::chrono::seconds age) {
    ::mkdir(path(name).c_str(), 0700);
    std::ofstream(path(name + "/secret")) << kBytes;
    fs::last_write_time(path(name), fs::file_time_type::clock::now() - age);
  };
  make("lockstep-aaaaaa", std::chrono::hours(1));
  make("lockstep-bbbbbb", std::chrono::hours(1));
  make("lockstep-cccccc", std::chrono::seconds(1));
  make("lockstep-other-dddddd", std::chrono::hours(1));
  const FileDescriptor in_use(::open(path("lockstep-bbbbbb").c_str(), O_RDONLY | O_DIRECTORY));
  ASSERT_EQ(::flock(in_use.get(), LOCK_EX), 0);
  {
    SecretFolder folder("lockstep");
    folder.write(Secret::random());
    EXPECT_TRUE(fs::exists(folder.secret_file()));
    SecretFolder another("lockstep");
    EXPECT_TRUE(fs::exists(folder.path())) << "in use";
  }
  EXPECT_FALSE(fs::exists(path("lockstep-aaaaaa")));
  EXPECT_TRUE(fs::exists(path("lockstep-bbbbbb"))) << "in use";
  EXPECT_TRUE(fs::exists(path("lockstep-cccccc"))) << "its process may not have locked it yet";
  EXPECT_TRUE(fs::exists(path("lockstep-other-dddddd"))) << "not one of these";
  before ? ::setenv("TMPDIR", restored.c_str(), 1) : ::unsetenv("TMPDIR");
}

TEST_F(Secrets, FolderThatCannotBeMadeSaysTheRemedy) {
  const char* before = std::getenv("TMPDIR");
  const std::string restored = before ? before : "";
  ::setenv("TMPDIR", path("missing").c_str(), 1);
  expect_error<SystemError>([] { SecretFolder folder("lockstep"); }, path("missing"), "set TMPDIR");
  before ? ::setenv("TMPDIR", restored.c_str(), 1) : ::unsetenv("TMPDIR");
}

TEST_F(Secrets, OfProcessesThatStartAtOnceAreTheSame) {
  constexpr int kRounds = 20, kProcesses = 8;
  for (int round = 0; round < kRounds; ++round) {
    const auto state = path("round" + std::to_string(round));
    const auto lookup = variables({{"XDG_STATE_HOME", state}});
    int start[2], answers[2];
    ASSERT_EQ(::pipe(start), 0);
    ASSERT_EQ(::pipe(answers), 0);
    std::vector<pid_t> children;
    for (int i = 0; i < kProcesses; ++i) {
      children.push_back(::fork());
      if (children.back() != 0) continue;
      char byte;
      ::close(start[1]);
      bool told = ::read(start[0], &byte, 1) == 0;  // the end of the pipe starts all at once
      try {
        const auto secret = find_secret(true, lookup);
        told = told && ::write(answers[1], secret.bytes().data(), 32) == 32;
      } catch (const std::exception& error) {
        told = false;
      }
      ::_exit(told ? 0 : 1);
    }
    for (const int end : {start[0], start[1], answers[1]}) ::close(end);
    std::set<std::string> secrets;
    char bytes[32];
    for (int i = 0; i < kProcesses && ::read(answers[0], bytes, sizeof bytes) == sizeof bytes; ++i)
      secrets.emplace(bytes, sizeof bytes);
    ::close(answers[0]);
    for (const pid_t child : children) {
      int status = -1;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
    }
    EXPECT_EQ(secrets, std::set<std::string>{contents_of(state + "/lockstep/secret")});
    for (const auto& entry : fs::directory_iterator(state + "/lockstep")) EXPECT_EQ(entry.path().filename(), "secret");
  }
}

}  // namespace
}  // namespace lockstep
