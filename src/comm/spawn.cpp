#include <lockstep/spawn.h>

#include <cxxabi.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <typeinfo>

#include <lockstep/error.h>

#include "base/error.h"
#include "base/exit_status.h"
#include "base/text.h"
#include "base/variables.h"
#include "rendezvous/failure.h"
#include "rendezvous/net/address.h"
#include "rendezvous/store/protocol.h"
#include "rendezvous/store/store_server.h"

extern char** environ;

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kCall = "LOCKSTEP_SPAWN_CALL";      // number of the call of spawn() that started this rank
constexpr const char* kParent = "LOCKSTEP_SPAWN_PARENT";  // pid of the process that started this rank
constexpr const char* kReport = "LOCKSTEP_SPAWN_REPORT";  // descriptor on which this rank reports how it ended

// Descriptors of a rank.
constexpr int kTheirReport = 3;
constexpr int kTheirSecret = 4;

// How many calls of spawn() this process has made: the same number means the same call in a rank and its parent.
int calls_so_far = 0;

int number_from(const char* variable) {
  return read_number(process_variable, variable, 0, std::numeric_limits<int>::max()).value_or(-1);
}

// --- in a rank

std::string type_of(const std::exception& error) {
  int status = 0;
  const char* raw = typeid(error).name();
  std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(raw, nullptr, nullptr, &status), std::free);
  return without_nesting(status == 0 ? name.get() : raw);
}

// The message of the current exception. The type of an exception that is not lockstep's is part of it.
std::string describe_error() {
  try {
    throw;
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    return text(type_of(error), ": ", error.what());
  } catch (...) {
    return message_of(std::current_exception());
  }
}

// The report of the current exception to the parent.
std::vector<std::string> report_error() {
  const auto error = std::current_exception();
  std::vector<std::string> fields{name_of(kind_of(error))};
  for (auto& field : to_fields({ErrorKind::kPeer, describe_error(), culprit_of(error), rank_of(error)}))
    fields.push_back(std::move(field));
  return fields;
}

[[noreturn]] void run_as_rank(const std::function<void(ProcessGroup)>& rank_main, const SpawnOptions& options) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != number_from(kParent)) ::_exit(1);  // the parent died before this process could watch it
  int report = number_from(kReport);
  for (int inherited : {report, kTheirSecret}) ::fcntl(inherited, F_SETFD, FD_CLOEXEC);
  std::vector<std::string> ending;
  try {
    rank_main(init_process_group({.backend = options.backend, .timeout = options.timeout}));
    ending = {""};
  } catch (...) {
    ending = report_error();
  }
  auto said = pack(ending);
  [[maybe_unused]] auto written = ::write(report, said.data(), said.size());
  std::exit(ending[0].empty() ? 0 : 1);
}

// --- in the parent

/// A file in memory that the ranks inherit. Unlike a file in a folder, it disappears with the processes, however they
/// end.
FileDescriptor write_to_memory(const Secret& secret) {
  FileDescriptor file(::memfd_create("lockstep-secret", MFD_CLOEXEC));
  const auto& bytes = secret.bytes();
  if (!file.is_open() || ::fchmod(file.get(), 0600) != 0 ||
      ::write(file.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()))
    throw SystemError(text("spawn: memfd_create for the job's secret: ", std::strerror(errno)));
  return file;
}

struct Ending {
  std::optional<ErrorKind> kind{};  // none: its function returned
  Failure failure{};                // its message, culprit and reporter
  bool is_reported = false;         // the rank reported it; otherwise its process ended without a report
};

/// One rank's process, killed with the object.
class Child {
 public:
  Child(int rank, int world_size, int call, int port, const FileDescriptor& secret) : rank_(rank) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw SystemError(text("pipe2: ", std::strerror(errno)));
    report_ = FileDescriptor(ends[0]);
    FileDescriptor child_end(ends[1]);
    auto environment = inherited();
    auto set = [&](const char* name, const auto& value) { environment.push_back(text(name, '=', value)); };
    set("RANK", rank);
    set("LOCAL_RANK", rank);
    set("WORLD_SIZE", world_size);
    set("LOCAL_WORLD_SIZE", world_size);
    set("MASTER_ADDR", loopback_address());
    set("MASTER_PORT", port);
    set("LOCKSTEP_STORE_HOSTED", 1);
    set("LOCKSTEP_SECRET_FILE", text("/proc/self/fd/", kTheirSecret));
    set(kCall, call);
    set(kParent, ::getpid());
    set(kReport, kTheirReport);
    auto arguments = own_arguments();
    auto argv = pointers(arguments);
    auto envp = pointers(environment);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    // First to a number that neither descriptor has, because the second dup2 must not close the source of the first.
    ::posix_spawn_file_actions_adddup2(&actions, child_end.get(), kTheirReport + 10);
    ::posix_spawn_file_actions_adddup2(&actions, secret.get(), kTheirSecret);
    ::posix_spawn_file_actions_adddup2(&actions, kTheirReport + 10, kTheirReport);
    ::posix_spawn_file_actions_addclose(&actions, kTheirReport + 10);
    int failure = ::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, argv.data(), envp.data());
    ::posix_spawn_file_actions_destroy(&actions);
    if (failure != 0) throw SystemError(text("cannot start rank ", rank, ": ", std::strerror(failure)));
  }

  ~Child() {
    if (ending_) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  int rank() const { return rank_; }
  int report() const { return report_.get(); }
  const std::optional<Ending>& ending() const { return ending_; }

  /// Reads its report. At the end of the report, waits for the process and records how it ended. Call it when report()
  /// is readable.
  void listen() {
    char bytes[4096];
    ssize_t got = ::read(report_.get(), bytes, sizeof bytes);
    if (got > 0) {
      said_.append(bytes, static_cast<size_t>(got));
      return;
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);  // the end of its report is the end of its last thread
    ending_ = read_ending(status);
  }

 private:
  // Variables of a launcher describe this process, not its children.
  static std::vector<std::string> inherited() {
    std::vector<std::string> result;
    for (char** entry = environ; *entry; ++entry) {
      std::string name(*entry, std::strcspn(*entry, "="));
      bool is_replaced = name == "RANK" || name == "WORLD_SIZE" || name == "LOCAL_RANK" || name == "LOCAL_WORLD_SIZE" ||
                         name == "MASTER_ADDR" || name == "MASTER_PORT" || name == "LOCKSTEP_STORE_HOSTED" ||
                         name == "LOCKSTEP_SECRET_FILE" || name == "LOCKSTEP_INIT_METHOD" || name == kCall ||
                         name == kParent || name == kReport || name.starts_with("TORCHELASTIC_");
      if (!is_replaced) result.emplace_back(*entry);
    }
    return result;
  }

  static std::vector<std::string> own_arguments() {
    std::ifstream file("/proc/self/cmdline");
    std::vector<std::string> result;
    for (std::string argument; std::getline(file, argument, '\0');) result.push_back(argument);
    return result;
  }

  static std::vector<char*> pointers(std::vector<std::string>& strings) {
    std::vector<char*> result;
    for (auto& string : strings) result.push_back(string.data());
    result.push_back(nullptr);
    return result;
  }

  Ending read_ending(int status) const {
    if (WIFEXITED(status)) {
      try {
        auto fields = unpack(said_);
        if (fields.size() == 1) return {std::nullopt, {}, true};
        if (fields.size() > 1) return {parse_error_kind(fields[0]), read_failure(fields, 1), true};
      } catch (const ProtocolError&) {
      }
    }
    return {ErrorKind::kPeer,
            {ErrorKind::kPeer,
             text("its process (pid ", pid_, ") ended before its function returned: ", describe_exit_status(status)),
             Culprit{rank_, CulpritRole::kExited}}};
  }

  const int rank_;
  pid_t pid_ = -1;
  FileDescriptor report_;
  std::string said_;
  std::optional<Ending> ending_;
};

[[noreturn]] void throw_ending(int rank, const Ending& ending) {
  const auto& failure = ending.failure;
  std::string prefix = failure.reporter == rank ? "" : text("rank ", rank, ": ");
  throw_error(*ending.kind, prefix + failure.message, rank, failure.culprit);
}

/// All ranks of one call of spawn(), and the first failure among them.
class Family {
 public:
  Family(int world_size, int call, int port, const FileDescriptor& secret) {
    for (int rank = 0; rank < world_size; ++rank)
      children_.push_back(std::make_unique<Child>(rank, world_size, call, port, secret));
  }

  void wait(const SpawnOptions& options) {
    auto deadline = options.join_timeout.count() > 0 ? Clock::now() + options.join_timeout : Clock::time_point::max();
    for (auto running = this->running(); !running.empty(); running = this->running()) {
      if (!listen(running, deadline)) {
        if (failed_ < 0)
          throw TimeoutError(text("spawn: ", list(running), " still running after ", options.join_timeout.count(),
                                  " ms; they are killed"));
        break;  // the grace time is over
      }
      for (Child* child : running) note(*child, options, deadline);
    }
    if (failed_ >= 0) throw_ending(failed_, cause_);
  }

 private:
  std::vector<Child*> running() const {
    std::vector<Child*> result;
    for (const auto& child : children_)
      if (!child->ending()) result.push_back(child.get());
    return result;
  }

  static std::string list(const std::vector<Child*>& children) {
    std::vector<std::string> names;
    for (const Child* child : children) names.push_back(text("rank ", child->rank()));
    return text(enumerate(names), names.size() == 1 ? " is" : " are");
  }

  // Returns false at the deadline.
  static bool listen(const std::vector<Child*>& running, Clock::time_point deadline) {
    std::vector<pollfd> ready;
    for (Child* child : running) ready.push_back({child->report(), POLLIN, 0});
    auto left =
        std::chrono::ceil<milliseconds>(std::min<Clock::duration>(deadline - Clock::now(), std::chrono::hours(1)));
    if (left.count() <= 0) return false;
    ::poll(ready.data(), ready.size(), static_cast<int>(left.count()));
    for (size_t i = 0; i < ready.size(); ++i)
      if (ready[i].revents != 0) running[i]->listen();
    return true;
  }

  // Keeps the first failure. The PeerError of a rank is a consequence, so a later error of another kind replaces it.
  void note(const Child& child, const SpawnOptions& options, Clock::time_point& deadline) {
    if (!child.ending() || !child.ending()->kind) return;
    bool is_consequence = child.ending()->kind == ErrorKind::kPeer && child.ending()->is_reported;
    if (failed_ < 0) deadline = std::min(deadline, Clock::now() + options.grace);
    if (failed_ >= 0 && (is_consequence || !is_consequence_)) return;
    failed_ = child.rank();
    cause_ = *child.ending();
    is_consequence_ = is_consequence;
  }

  std::vector<std::unique_ptr<Child>> children_;
  int failed_ = -1;
  Ending cause_;
  bool is_consequence_ = false;
};

}  // namespace

bool is_spawned() {
  return std::getenv(kCall) != nullptr;
}

void spawn(int world_size, const std::function<void(ProcessGroup)>& rank_main, const SpawnOptions& options) {
  if (world_size < 1) throw UsageError(text("spawn: world_size is ", world_size, "; it must be at least 1"));
  int call = ++calls_so_far;
  if (is_spawned()) {
    if (call < number_from(kCall)) return;  // an earlier call, whose ranks have ended
    if (call > number_from(kCall))
      throw UsageError("spawn: this process is a rank that spawn has started; it cannot spawn");
    run_as_rank(rank_main, options);
  }
  auto secret = Secret::random();
  const auto file = write_to_memory(secret);
  const Endpoint loopback{loopback_address(), 0};
  StoreServer store({loopback, secret, 0, "spawn's caller"});
  Family(world_size, call, store.port(), file).wait(options);
}

}  // namespace lockstep
