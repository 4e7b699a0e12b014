// Another user of the host, who looks for the secret, the memory and the ports of a job.

#include <dirent.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "attack/attacked_job.h"
#include "rendezvous/net/peer_proof.h"
#include "rendezvous/net/secret.h"
#include "rendezvous/store/store_client.h"
#include "support/child_process.h"
#include "support/listening_sockets.h"
#include "support/loopback.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using testing::IsEmpty;
using testing::IsSupersetOf;

enum class User { kOwner, kOther };

bool can_open(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file >= 0) ::close(file);
  return file >= 0;
}

bool can_list(const std::string& path) {
  DIR* folder = ::opendir(path.c_str());
  if (folder) ::closedir(folder);
  return folder != nullptr;
}

/// Whether the kernel permits access to the memory of the process; the address itself may be invalid.
bool can_read_memory(int pid) {
  char byte = 0;
  iovec here{&byte, 1}, there{&byte, 1};
  return ::process_vm_readv(pid, &here, 1, &there, 1, 0) >= 0 || errno == EFAULT;
}

bool can_join(int port, const Secret& key) {
  try {
    StoreClient client({{"127.0.0.1", port}, key, 0, Clock::now() + 5s});
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// Where the parts of a job are.
struct JobParts {
  std::string secret_file;
  std::vector<int> processes;
  int store_port = 0;
};

/// The accesses that succeed for the user of this process. A user who cannot read the secret tries a random key.
std::set<std::string> successful_accesses(const JobParts& job_parts) {
  std::set<std::string> found;
  auto note = [&](bool succeeded, const char* access) {
    if (succeeded) found.insert(access);
  };
  note(can_open(job_parts.secret_file), "read the secret");
  note(can_list(std::filesystem::path(job_parts.secret_file).parent_path()), "list the secret's folder");
  for (int pid : job_parts.processes) {
    const std::string process = "/proc/" + std::to_string(pid);
    note(can_list(process + "/fd"), "list descriptors");
    for (int fd = 0; fd < 64; ++fd) note(can_open(process + "/fd/" + std::to_string(fd)), "open descriptors");
    note(can_open(process + "/environ"), "read the environment");
    note(can_open(process + "/mem"), "open the memory");
    note(can_list(process + "/map_files"), "list mapped files");
    note(can_read_memory(pid), "read the memory");
    note(::kill(pid, 0) == 0, "send signals");
  }
  for (const auto& name : names_in("/dev/shm", "lockstep-")) note(can_open(name), "open named shared memory");
  const bool is_reader = found.contains("read the secret");
  note(can_join(job_parts.store_port, (is_reader ? Secret::from_file(job_parts.secret_file) : Secret::random()).key(0)),
       "join the store");
  return found;
}

/// Runs successful_accesses() as that user.
std::set<std::string> accesses_of(User user, const JobParts& job_parts) {
  ChildProcess child([&](const ChildProcess::Parent& test) {
    if (user == User::kOther) become_other_user();
    for (const auto& access : successful_accesses(job_parts)) test.write_line(access);
    test.write_line("end");
  });
  std::set<std::string> found;
  for (auto line = child.read_line(60s); line != "end"; line = child.read_line(60s)) {
    found.insert(line);
    if (line.empty()) {
      ADD_FAILURE() << "the user's process did not finish";
      break;
    }
  }
  return found;
}

class OtherUser : public testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can act as another user";
  }
};

TEST_F(OtherUser, FindsNothingAndJoinsNothing) {
  for (const char* backend : {"shm", "gloo"}) {
    SCOPED_TRACE(backend);
    AttackedJob job({.ranks = 2, .backend = backend});
    ASSERT_TRUE(job.advances()) << job.process().output();
    const JobParts job_parts{job.variable(0, "LOCKSTEP_SECRET_FILE"), job.living(),
                             std::stoi(job.variable(0, "MASTER_PORT"))};
    ASSERT_TRUE(job_parts.secret_file.starts_with(job.temporary_files().string())) << job_parts.secret_file;
    ASSERT_GE(job_parts.processes.size(), 4u) << "the launcher, the supervisor and two ranks";
    EXPECT_THAT(accesses_of(User::kOther, job_parts), IsEmpty());
    EXPECT_THAT(accesses_of(User::kOwner, job_parts),
                IsSupersetOf({"read the secret", "list the secret's folder", "list descriptors", "open descriptors",
                              "read the environment", "open the memory", "read the memory", "join the store"}))
        << "the attack itself works";
    EXPECT_TRUE(job.advances(20));
    job.expect_right_results();
  }
}

// --- the ports at which ranks connect to each other, which are open only for a moment

/// A connection to the port of a rank by another user, who pretends to be a rank but does not know the key.
class ForgedRank {
 public:
  ForgedRank(int rank, int listener, int port) : proof_(Secret::random(), rank, listener), stranger_(port) {}

  /// Answers the rank's challenge. Returns false if there is none in time.
  bool answer_challenge() {
    if (!eventually([&] {
          stranger_.is_cut_off_within(10ms);
          return stranger_.heard().size() >= peer_proof::kChallengeBytes;
        }))
      return false;
    stranger_.say(proof_.answer(stranger_.heard().substr(0, peer_proof::kChallengeBytes)));
    return true;
  }
  /// Answers before a challenge has arrived.
  void answer_first() { stranger_.say(proof_.answer(random_bytes(peer_proof::kChallengeBytes))); }

  /// Whether the rank closed the connection without sending more than its challenge.
  std::string result() {
    if (!stranger_.is_cut_off_within(10s)) return "not cut off";
    return stranger_.heard().size() > peer_proof::kChallengeBytes ? "accepted" : "cut off";
  }

 private:
  peer_proof::Connector proof_;
  Stranger stranger_;
};

class ConnectingJob : public OtherUser {
 protected:
  /// Three ranks, of which rank 1 stops between listening and connecting, and the others wait for it.
  JobProcesses start_and_stop_while_connecting() {
    JobProcesses ranks(FAILING_RANK, 3, {"stops_while_connecting"},
                       {{"TEST_BACKEND", "slow"},
                        {"XDG_STATE_HOME", folder_.path().string()},
                        {"LOCKSTEP_FLIGHT_DIR", folder_.path().string()},
                        {"OMP_NUM_THREADS", "1"}});
    ranks.start_all();
    ranks[1].expect_line("published");
    return ranks;
  }

  static int port_for_tensors(JobProcesses& ranks, int rank) {
    std::set<int> ports;
    EXPECT_TRUE(eventually([&] {
      ports = listening_ports(ranks[rank].pid());
      ports.erase(ranks.port());
      return !ports.empty();
    }));
    return ports.empty() ? 0 : *ports.begin();
  }

  TemporaryFolder folder_;
};

TEST_F(ConnectingJob, DoesNotAcceptAnotherUserAsARank) {
  constexpr int kForgedRanks = 5;
  auto ranks = start_and_stop_while_connecting();
  const int waiting = port_for_tensors(ranks, 0), stopped = port_for_tensors(ranks, 1);
  ChildProcess other([&](const ChildProcess::Parent& test) {
    become_other_user();
    for (int i = 0; i < kForgedRanks; ++i) {
      ForgedRank forged(1 + i % 2, 0, waiting);
      test.write_line(forged.answer_challenge() ? forged.result() : "no challenge");
    }
    test.write_line(can_join(ranks.port(), Secret::random().key(0)) ? "accepted" : "cut off");
    std::vector<ForgedRank> early;
    for (int i = 0; i < kForgedRanks; ++i) early.emplace_back(2, 1, stopped).answer_first();
    test.write_line("has spoken to rank 1");
    for (auto& forged : early) test.write_line(forged.result());
  });
  for (int i = 0; i < kForgedRanks; ++i) EXPECT_EQ(other.read_line(30s), "cut off") << "by rank 0";
  EXPECT_EQ(other.read_line(30s), "cut off") << "by the store";
  ASSERT_EQ(other.read_line(30s), "has spoken to rank 1");
  ranks[1].say("go on");
  for (int i = 0; i < kForgedRanks; ++i) EXPECT_EQ(other.read_line(30s), "cut off") << "by rank 1";
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks[rank].wait(60s), 0) << ranks[rank].output();
}

}  // namespace
}  // namespace lockstep
