#include "comm/setup/make_group.h"

#include <algorithm>

#include <lockstep/error.h>

#include "backends/factories.h"
#include "base/error.h"
#include "base/log.h"
#include "base/owner_process.h"
#include "base/text.h"
#include "base/wait_notice.h"
#include "comm/setup/backend_choice.h"

namespace lockstep::detail {
namespace {

/// Calls `ring` when the job fails while a backend is being created.
class Alarm final : public JobListener {
 public:
  Alarm(std::shared_ptr<Job> job, const std::string& group, std::function<void(std::exception_ptr)> ring)
      : job_(std::move(job)), ring_(std::move(ring)) {
    job_->subscribe(group, *this);
  }
  ~Alarm() override { job_->unsubscribe(*this); }

 private:
  void on_failure(std::exception_ptr cause) override { ring_(cause); }

  const std::shared_ptr<Job> job_;
  const std::function<void(std::exception_ptr)> ring_;
};

/// Prints a warning, on rank 0 of the group only, when creating the backend takes long. The rendezvous has succeeded at
/// that point, so the likely reason is that the ranks cannot connect.
class MakingNotice final : public JobListener {
 public:
  MakingNotice(std::shared_ptr<Job> job, const Membership& group) : job_(std::move(job)), group_(group) {
    if (group_.rank == 0) job_->subscribe(group_.name, *this);
  }
  ~MakingNotice() override { job_->unsubscribe(*this); }

 private:
  void on_failure(std::exception_ptr) override {}
  void on_tick() override {
    const auto now = WaitNotice::Clock::now();
    if (!notice_.is_due(now)) return;
    log_warning_async(text(describe_me(group_), ": has waited for ", notice_.seconds(now), " s for the ", group_.size,
                           " ranks of group '", group_.name, "' to connect by backend ", group_.backend_name,
                           ". Check that their hosts can reach each other on all ports; LOCKSTEP_INTERFACE selects the "
                           "network interface"));
  }

  const std::shared_ptr<Job> job_;
  const Membership& group_;
  WaitNotice notice_;  // used only by the job's thread
};

Membership membership_of(const Job& job, const GroupSpec& spec, const std::string& backend_asked) {
  Membership result{spec.name,
                    Membership::kNotAMember,
                    static_cast<int>(spec.ranks_in_job.size()),
                    0,
                    spec.device,
                    backend_asked,
                    spec.backend,
                    spec.timeout,
                    {}};
  for (int rank : spec.ranks_in_job) result.peers.push_back(job.peers().at(rank));
  result.rank = rank_in_group(result, job.rank());
  if (result.rank == Membership::kNotAMember) return result;
  auto me = result.peers.begin() + result.rank;
  result.local_rank = static_cast<int>(std::count_if(
      result.peers.begin(), me, [&](const Peer& peer) { return peer.process.host_id == me->process.host_id; }));
  return result;
}

bool on_one_host(const std::vector<Peer>& peers) {
  return std::all_of(peers.begin(), peers.end(),
                     [&](const Peer& peer) { return peer.process.host_id == peers.front().process.host_id; });
}

std::string rank_key(int rank) {
  return text("made/", rank);
}

// Blocks until all ranks have created their backend, since this rank may be faster than other ranks. Throws PeerError
// with the reason when another rank could not create its backend.
void await_all(const BackendContext& context, const Membership& group) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < context.size; ++rank) keys.push_back(rank_key(rank));
  context.store->set(rank_key(context.rank), "");
  std::vector<std::string> errors;
  try {
    errors = context.store->multi_get(keys, context.timeout);
  } catch (const TimeoutError&) {
    std::vector<std::string> late;
    for (int rank = 0; rank < context.size; ++rank)
      if (!context.store->check({rank_key(rank)})) late.push_back(describe_rank(group, rank));
    throw TimeoutError(text("not created on ", enumerate(late), " within ", context.timeout.count(), " ms"));
  }
  for (int rank = 0; rank < context.size; ++rank) {
    const auto& error = errors[rank];
    if (!error.empty()) throw PeerError(text(describe_rank(group, rank), " could not create the backend: ", error));
  }
}

void tell_others(const BackendContext& context, const std::string& error) {
  try {
    context.store->set(rank_key(context.rank), error);
  } catch (const Error&) {  // the store is gone, so the other ranks know
  }
}

BackendContext context_of(const std::shared_ptr<Job>& job, const GroupSpec& spec, const Membership& membership,
                          const std::string& backend) {
  BackendContext context;
  context.rank = membership.rank;
  context.size = membership.size;
  context.store = with_prefix(job->store(), text(group_keys(spec.name), backend, "/"));
  context.device = spec.device;
  context.one_host = on_one_host(membership.peers);
  context.address = job->address();
  context.timeout = spec.timeout;
  context.on_failure = [job, name = spec.name](std::function<void(std::exception_ptr)> ring) -> std::shared_ptr<void> {
    return std::make_shared<Alarm>(job, name, std::move(ring));
  };
  return context;
}

std::unique_ptr<Backend> make_backend(const std::shared_ptr<Job>& job, const GroupSpec& spec,
                                      const Membership& membership) {
  const auto context = context_of(job, spec, membership, membership.backend_name);
  const MakingNotice notice(job, membership);
  try {
    auto backend = find_backend(membership.backend_name)(context);
    await_all(context, membership);
    return backend;
  } catch (const NoSharedMemory&) {  // thrown on all ranks
    throw;
  } catch (...) {
    auto error = std::current_exception();
    tell_others(context, message_of(error));
    if (!is_lockstep_error(error)) throw;
    // A failed connection is only a symptom: the other rank may have died.
    if (is_a<PeerError>(error))
      error = to_exception(job->report(spec.name, to_failure(error), Job::Certainty::kSymptom));
    rethrow_with_prefix(
        error, text(describe_me(membership), ": backend ", membership.backend_name, " of group '", spec.name, "': "),
        "", membership.rank);
  }
}

// Creates the first backend that works. Only a lack of shared memory leads to the next one, on all ranks.
std::unique_ptr<Backend> make_chosen_backend(const std::shared_ptr<Job>& job, const GroupSpec& spec,
                                             Membership& membership) {
  std::vector<std::string> hosts;
  for (const auto& peer : membership.peers) hosts.push_back(peer.process.host_id);
  auto choice = std::vector{spec.backend};
  if (spec.backend == "auto")
    choice = spec.device.is_cuda() ? std::vector<std::string>{"nccl"} : choose_backends(hosts, available_backends());
  for (const auto& name : choice) {
    membership.backend_name = name;
    try {
      return make_backend(job, spec, membership);
    } catch (const NoSharedMemory& error) {
      if (name == choice.back())
        throw UsageError(text(describe_me(membership), ": backend ", name, " of group '", spec.name,
                              "': ", without_rank(error.what(), membership.rank)),
                         membership.rank, {});
      membership.why_not_shm = error.what();
      if (membership.rank == 0)
        log_warning(text("group '", spec.name, "' uses backend ", choice.back(), " instead of ", name,
                         ", which is faster: ", error.what()));
    }
  }
  return nullptr;
}

// Creates the group for the tensors of one device.
std::shared_ptr<Group> make_part(const std::shared_ptr<Job>& job, const GroupSpec& spec,
                                 const std::string& backend_asked, std::shared_ptr<Group> cpu_group = nullptr) {
  auto membership = membership_of(*job, spec, backend_asked);
  std::unique_ptr<Backend> backend;
  if (membership.rank != Membership::kNotAMember) {
    backend = make_chosen_backend(job, spec, membership);
    log_info(text("rank ", membership.rank, " of ", membership.size, " is in group '", spec.name, "', backend ",
                  membership.backend_name));
  }
  return make_shared_owned<Group>(std::move(membership), job, std::move(backend), std::move(cpu_group));
}

}  // namespace

std::shared_ptr<Group> make_group(const std::shared_ptr<Job>& job, const GroupSpec& spec) {
  const auto names = parse_backends(spec.backend);
  auto part = spec;
  part.backend = spec.device.is_cuda() ? names.cuda : names.cpu;
  if (part.backend.empty())
    throw UsageError(text("group '", spec.name, "' is for tensors on ", spec.device, ", but backend ", spec.backend,
                          " does not support that device; choose one that does, or use auto"));
  if (spec.device.is_cpu() || names.cpu.empty()) return make_part(job, part, spec.backend);
  auto for_cpu = spec;
  for_cpu.name += ":cpu";
  for_cpu.device = c10::kCPU;
  for_cpu.backend = names.cpu;
  return make_part(job, part, spec.backend, make_part(job, for_cpu, spec.backend));
}

// The name has the base_name of the group, so that a failure of one breaks both.
void make_side_group(Group& group, const CallSite& site) {
  if (group.side_group()) return;
  const auto& membership = group.membership();
  const auto name = text(membership.name, ":side");
  const auto barrier = [&] {
    group.run({{Operation::kNewGroup, {}, {}, {}, {}, name},
               [](Backend& backend, const CallInfo& info) { backend.barrier(info); }},
              {membership.timeout, site});
  };
  barrier();
  auto side = make_group(
      group.job(), {name, ranks_in_job(membership), membership.backend_name, membership.device, membership.timeout});
  barrier();  // no rank continues or exits while other ranks still create the group
  group.set_side_group(std::move(side));
}

}  // namespace lockstep::detail
