// A program for `lockstep run` to start: launched SCENARIO [ARGUMENTS]. Without torch, so that it starts at once.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include <lockstep/environment.h>

#include "base/variables.h"
#include "rendezvous/net/secret.h"
#include "rendezvous/rendezvous.h"
#include "rendezvous/store/store_client.h"

namespace {

using namespace lockstep;

void wait_for_the_end() {
  for (;;) ::pause();
}

/// Many lines on both streams, in pieces that do not end where lines do.
void print_lines(int rank, int count) {
  std::string bytes[2];
  for (int line = 0; line < count; ++line) {
    auto& stream = bytes[line % 2];
    stream +=
        "line " + std::to_string(rank) + " " + std::to_string(line) + " " + std::string(line % 97, 'x') + " end\n";
    size_t piece = 1 + static_cast<size_t>(line % 4099);
    while (stream.size() > piece) {
      size_t put = static_cast<size_t>(std::max<ssize_t>(0, ::write(1 + line % 2, stream.data(), piece)));
      stream.erase(0, put);
    }
  }
  for (int i = 0; i < 2; ++i) [[maybe_unused]] auto put = ::write(1 + i, bytes[i].data(), bytes[i].size());
}

/// Children of every kind that escape: in the same group, in a group of their own, and a daemon that left the session.
void start_family() {
  if (::fork() == 0) {
    ::signal(SIGTERM, SIG_IGN);
    wait_for_the_end();
  }
  if (::fork() == 0) {
    ::setpgid(0, 0);
    wait_for_the_end();
  }
  if (::fork() == 0) {
    ::setsid();
    if (::fork() != 0) ::_exit(0);
    ::signal(SIGTERM, SIG_IGN);
    ::signal(SIGINT, SIG_IGN);
    if (::fork() == 0) wait_for_the_end();
    wait_for_the_end();
  }
}

class Listener : public StoreListener {
 public:
  void on_failure(const std::string&, const Failure& failure) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // slow of hearing: SIGTERM must not overtake it
    std::lock_guard lock(mutex_);
    failure_ = std::string(name_of(failure.kind)) + ": " + failure.message;
    changed_.notify_all();
  }
  void on_left(int, const std::string&, int64_t) override {}
  std::string on_question(const std::string&, const std::string&) override { return ""; }
  std::string doing() override { return "waiting"; }
  void on_tick() override {}
  std::string wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !failure_.empty(); });
    return failure_;
  }
  bool has_heard() {
    std::lock_guard lock(mutex_);
    return !failure_.empty();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string failure_;
};

/// A rank at the job's store, as init_process_group makes one.
struct Member {
  explicit Member(int rank) {
    const auto environment = Environment::detect();
    auto place = std::get<RendezvousPort>(find_rendezvous("env://", environment, process_variable));
    const int generation = restart_count(process_variable);
    if (place.rank_zero_hosts) throw std::runtime_error("the launcher should host the store");
    line = std::make_unique<StoreClient>(
        StoreClient::Options{place.endpoint, Secret::from_file(std::getenv("LOCKSTEP_SECRET_FILE")).key(generation),
                             generation, std::chrono::steady_clock::now() + std::chrono::seconds(20)});
    const auto me = this_process();
    line->listen(&listener);
    line->call(Verb::kJoin, {"rank/" + std::to_string(rank), "here", std::to_string(rank), me.host, me.host_id,
                             std::to_string(me.pid), "5000"});
    for (int other = 0; other < environment.world_size; ++other) {
      StoreClient::Fields late;
      line->call(Verb::kGet, {"rank/" + std::to_string(other)},
                 std::chrono::steady_clock::now() + std::chrono::seconds(20), late);
    }
  }
  Listener listener;
  std::unique_ptr<StoreClient> line;
};

/// The last rank fails in the way said when all have met; the others print what they are told, and whether SIGTERM had
/// come before.
int meet(int rank, bool is_victim, const std::string& way) {
  sigset_t terminate;
  sigemptyset(&terminate);
  sigaddset(&terminate, SIGTERM);
  if (!is_victim) ::sigprocmask(SIG_BLOCK, &terminate, nullptr);
  Member member(rank);
  if (is_victim) {
    if (way == "kill") ::raise(SIGKILL);
    if (way == "die_of_sigterm") ::raise(SIGTERM);
    if (way == "leave") ::_exit(0);
    if (way == "exit") ::_exit(9);
    if (way == "stop") ::raise(SIGSTOP);
    if (way == "stop_and_abort") {  // resumes at the launcher's SIGTERM, as a rank that then throws its own error
      ::signal(SIGTERM, [](int) { std::abort(); });
      ::raise(SIGSTOP);
    }
    if (way.starts_with("give_up")) {  // the others know long before this process ends
      member.line->leave_job(Failure{ErrorKind::kPeer, "no data"});
      if (way == "give_up") ::signal(SIGTERM, [](int) { ::_exit(11); });
      wait_for_the_end();
    }
  }
  if (way == "rest") ::sigprocmask(SIG_UNBLOCK, &terminate, nullptr);
  if (way == "network") std::cout << "met" << std::endl;  // the test cuts it
  if (way == "exit" || way == "kill") {
    int number = 0;
    ::sigwait(&terminate, &number);
    std::cout << (member.listener.has_heard() ? "told before SIGTERM: " : "SIGTERM came first: ")
              << member.listener.wait() << std::endl;
    return 1;
  }
  std::cout << "told: " << member.listener.wait() << std::endl;
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string scenario = argc > 1 ? argv[1] : "";
  const auto environment = Environment::detect();
  const int rank = environment.rank;
  const bool is_last = rank == environment.world_size - 1;
  if (scenario == "lines") print_lines(rank, std::atoi(argv[2]));
  if (scenario == "meet") return meet(rank, is_last, argv[2]);
  if (scenario == "throw_alike") {
    ::signal(SIGTERM, SIG_IGN);  // so that each rank ends by its own error
    Member member(rank);
    throw std::runtime_error("rank " + std::to_string(rank) + ": no data");
  }
  if (scenario == "throw" && is_last) throw std::runtime_error("no data in " + std::string(argv[2]));
  if (scenario == "segfault" && is_last) {
    ::signal(SIGSEGV, SIG_DFL);  // sanitizers would exit instead
    ::raise(SIGSEGV);
  }
  if (scenario == "eat" && is_last)
    for (size_t mib = 0; mib < 4096; ++mib) std::memset(new char[1 << 20], 1, 1 << 20);
  if (scenario == "family") {
    start_family();
    std::cout << "started as " << ::getpid() << std::endl;
  }
  if (scenario == "stubborn") {
    for (int number : {SIGTERM, SIGINT, SIGUSR1, SIGHUP}) ::signal(number, SIG_IGN);
    std::cout << "started" << std::endl;
  }
  if (scenario == "told") {
    for (int number : {SIGTERM, SIGINT, SIGUSR1})
      ::signal(number, [](int got) {
        std::string line = "got " + std::string(::sigabbrev_np(got)) + "\n";
        [[maybe_unused]] auto put = ::write(1, line.data(), line.size());
        ::_exit(0);
      });
    std::cout << "started" << std::endl;
  }
  if (scenario != "lines") wait_for_the_end();
  return 0;
}
