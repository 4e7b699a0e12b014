#include "doctor/checks.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temporary_folder.h"
#include "tools/doctor_facts.h"

namespace lockstep::tool {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

TEST(Rendezvous, IsOnLoopbackWhenNothingIsSet) {
  const auto rendezvous = rendezvous_of({});
  EXPECT_EQ(rendezvous.kind, Rendezvous::Kind::kAddress);
  EXPECT_EQ(rendezvous.host, "127.0.0.1");
  EXPECT_EQ(rendezvous.port, 29500);
  EXPECT_EQ(rendezvous.port_source, "");
  EXPECT_FALSE(spans_hosts(rendezvous));
}

TEST(Rendezvous, IsWhereTheVariablesSay) {
  const auto rendezvous = rendezvous_of(kTwoHosts);
  EXPECT_EQ(rendezvous.host, "node1");
  EXPECT_EQ(rendezvous.host_source, "MASTER_ADDR");
  EXPECT_EQ(rendezvous.port, 29500);
  EXPECT_EQ(rendezvous.port_source, "MASTER_PORT");
  EXPECT_TRUE(spans_hosts(rendezvous));
}

TEST(Rendezvous, TakesTheInitMethodBeforeTheAddress) {
  auto variables = kTwoHosts;
  variables["LOCKSTEP_INIT_METHOD"] = "tcp://[2001:db8::1]:4000";
  auto rendezvous = rendezvous_of(variables);
  EXPECT_EQ(rendezvous.host, "2001:db8::1");
  EXPECT_EQ(rendezvous.port, 4000);
  variables["LOCKSTEP_INIT_METHOD"] = "file:///shared/job";
  rendezvous = rendezvous_of(variables);
  EXPECT_EQ(rendezvous.kind, Rendezvous::Kind::kFile);
  EXPECT_EQ(rendezvous.file, "/shared/job");
}

TEST(Rendezvous, KnowsPortsThatALauncherServesAndThatAreDerived) {
  auto variables = kTwoHosts;
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_FALSE(rendezvous_of(variables).port_is_served) << "the agent has MASTER_PORT, and ours is another";
  EXPECT_NE(rendezvous_of(variables).port, 29500);
  EXPECT_EQ(rendezvous_of(variables).port_source, "derived from MASTER_PORT");
  auto hosted = kTwoHosts;
  hosted["LOCKSTEP_STORE_HOSTED"] = "1";
  EXPECT_TRUE(rendezvous_of(hosted).port_is_served);
  EXPECT_FALSE(rendezvous_of(kTwoHosts).port_is_served);
  for (const auto& named : std::vector<std::map<std::string, std::string>>{
           {{"LOCKSTEP_JOB_ID", "a"}}, {{"SLURM_JOB_ID", "1"}, {"SLURM_STEP_ID", "0"}}}) {
    EXPECT_GE(rendezvous_of(named).port, 20000);
    EXPECT_LE(rendezvous_of(named).port, 29999);
    EXPECT_EQ(rendezvous_of(named).port_source, "derived from the job's name");
  }
}

TEST(Rendezvous, KeepsWhatJoiningWouldRefuse) {
  for (const auto& [variables, part] : std::map<std::map<std::string, std::string>, std::string>{
           {{{"MASTER_PORT", "99999"}}, "MASTER_PORT is \"99999\""},
           {{{"RANK", "1"}}, "WORLD_SIZE is not set"},
           {{{"LOCKSTEP_INIT_METHOD", "udp://x"}}, "LOCKSTEP_INIT_METHOD is \"udp://x\""},
           {{{"LOCKSTEP_INIT_METHOD", "tcp://x:0"}}, "tcp://host:port"},
           {{{"LOCKSTEP_INIT_METHOD", "tcp://x:65536"}}, "tcp://host:port"},
           {{{"LOCKSTEP_STORE_HOSTED", "1"}, {"MASTER_PORT", "1"}}, "MASTER_ADDR is not set"},
           {{{"LOCKSTEP_STORE_HOSTED", "yes"}}, "LOCKSTEP_STORE_HOSTED is \"yes\""},
           {{{"OMPI_COMM_WORLD_RANK", "0"},
             {"OMPI_COMM_WORLD_SIZE", "2"},
             {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
             {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}},
            "MASTER_ADDR is not set"}}) {
    const auto rendezvous = rendezvous_of(variables);
    EXPECT_EQ(rendezvous.kind, Rendezvous::Kind::kUnknown) << part;
    EXPECT_THAT(rendezvous.refusal, HasSubstr(part));
    expect_error(check_job(rendezvous), part, "lockstep run");
  }
}

TEST(Doctor, SaysWhichLauncherStartedIt) {
  expect_ok(check_job(rendezvous_of({})), "one process");
  expect_ok(check_job(rendezvous_of(kTwoHosts)), "rank 0 of 4, 2 of them on this host");
}

TEST(Doctor, AsksForASecretBeyondLoopbackOnly) {
  const SecretFile own{.path = "/home/me/.local/state/lockstep/secret"};
  expect_ok(check_secret(own, rendezvous_of({}), loopback()), "not needed on loopback");
  expect_error(check_secret(own, rendezvous_of(kTwoHosts), between_hosts()), "LOCKSTEP_SECRET_FILE is not set",
               "head -c 32 /dev/urandom");
  Network unresolved = between_hosts();
  unresolved.rendezvous.addresses.clear();
  expect_error(check_secret(own, rendezvous_of(kTwoHosts), unresolved), "LOCKSTEP_SECRET_FILE is not set", "umask 077");
  expect_ok(check_secret(own, rendezvous_of({{"LOCKSTEP_INIT_METHOD", "file:///shared/job"}}), {}), "not needed");
}

TEST(Doctor, NamesWhatIsWrongWithTheSecretFile) {
  const auto judge = [](SecretFile secret) { return check_secret(secret, rendezvous_of(kTwoHosts), between_hosts()); };
  const SecretFile good{.path = "/job.secret", .is_named = true, .exists = true, .bytes = 32};
  expect_ok(judge(good), "/job.secret, 32 bytes, mode 0600");
  auto secret = good;
  secret.exists = false;
  expect_error(judge(secret), "LOCKSTEP_SECRET_FILE is /job.secret, which does not exist",
               "/dev/urandom > /job.secret");
  secret = good;
  secret.is_regular = false;
  expect_error(judge(secret), "not a regular file", "job.secret");
  secret = good;
  secret.has_trusted_owner = false;
  expect_error(judge(secret), "belongs to another user", "that you own");
  secret = good;
  secret.mode = 0640;
  expect_error(judge(secret), "mode 0640", "chmod 600 /job.secret");
  secret = good;
  secret.failure = "Permission denied";
  expect_error(judge(secret), "cannot be read: Permission denied", "chmod 600");
  secret = good;
  secret.bytes = 31;
  expect_error(judge(secret), "31 bytes; a secret needs at least 32", "head -c 32");
}

TEST(Doctor, JudgesTheUsersOwnSecretWhenItExists) {
  const SecretFile open{.path = "/own", .exists = true, .mode = 0644, .bytes = 32};
  expect_error(check_secret(open, rendezvous_of({}), loopback()), "mode 0644", "chmod 600 /own");
}

TEST(SecretFile, IsLookedAtAndNotRead) {
  TemporaryFolder folder;
  const std::string path = folder.path() / "job.secret";
  EXPECT_FALSE(read_secret_file_status(lookup_in({{"LOCKSTEP_SECRET_FILE", path}})).exists);
  std::ofstream(path) << std::string(40, 's');
  ::chmod(path.c_str(), 0640);
  const auto secret = read_secret_file_status(lookup_in({{"LOCKSTEP_SECRET_FILE", path}}));
  EXPECT_TRUE(secret.exists && secret.is_named && secret.is_regular && secret.has_trusted_owner);
  EXPECT_EQ(secret.mode, 0640U);
  EXPECT_EQ(secret.bytes, 40U);
  EXPECT_EQ(read_secret_file_status(lookup_in({{"HOME", "/home/me"}})).path, "/home/me/.local/state/lockstep/secret");
  EXPECT_EQ(read_secret_file_status(lookup_in({{"XDG_STATE_HOME", "/state"}})).path, "/state/lockstep/secret");
}

TEST(Doctor, JudgesTheHostName) {
  const auto alone = rendezvous_of({});
  expect_ok(check_host_name(alone, loopback()), "node1 (127.0.0.1)");
  expect_ok(check_host_name(rendezvous_of(kTwoHosts), between_hosts()), "node1 (10.0.0.1)");
  auto network = between_hosts();
  network.host.addresses = {"127.0.1.1"};
  expect_warning(check_host_name(rendezvous_of(kTwoHosts), network), "127.0.1.1",
                 "put this line into /etc/hosts: 10.0.0.1 node1");
  network.host.addresses = {"127.0.1.1", "10.0.0.1"};
  expect_ok(check_host_name(rendezvous_of(kTwoHosts), network), "10.0.0.1");
  network.host.took = 1500ms;
  expect_warning(check_host_name(alone, network), "took 1.5 s", "/etc/resolv.conf");
  network.host = {.name = "node1", .failure = "Name or service not known"};
  expect_warning(check_host_name(alone, network), "does not resolve: Name or service not known", "/etc/hosts");
}

TEST(Doctor, JudgesTheWayToTheMeetingAddress) {
  const auto job = rendezvous_of(kTwoHosts);
  expect_ok(check_rendezvous_address(rendezvous_of({}), loopback()), "all ranks are on this host");
  auto network = between_hosts();
  expect_ok(check_rendezvous_address(job, network), "node1 (10.0.0.1), which is this host");
  network.is_rendezvous_host = false;
  network.local = "10.0.0.2";
  expect_ok(check_rendezvous_address(job, network), "reached from 10.0.0.2");
  network.rendezvous.took = 2s;
  expect_warning(check_rendezvous_address(job, network), "took 2.0 s", "set MASTER_ADDR to an address");
  network.local = "";
  network.route_failure = "Network is unreachable";
  expect_error(check_rendezvous_address(job, network), "Network is unreachable", "ip route get 10.0.0.1");
  network.rendezvous = {.name = "node1", .failure = "no such name"};
  expect_error(check_rendezvous_address(job, network), "MASTER_ADDR is node1, which does not resolve: no such name",
               "/etc/hosts on every host");
}

TEST(Doctor, RefusesAMeetingOnLoopbackForSeveralHosts) {
  expect_error(check_rendezvous_address(rendezvous_of(kTwoHosts), network_of("localhost", "127.0.0.1")),
               "which other hosts cannot reach", "set MASTER_ADDR");
  // One process so far: perhaps the others are on this host too.
  expect_warning(check_rendezvous_address(rendezvous_of({{"MASTER_ADDR", "node1"}}), network_of("node1", "127.0.1.1")),
                 "node1 (127.0.1.1)", "fix /etc/hosts");
  expect_ok(
      check_rendezvous_address(rendezvous_of({{"MASTER_ADDR", "localhost"}}), network_of("localhost", "127.0.0.1")),
      "all ranks are on this host");
}

TEST(Doctor, JudgesTheInterface) {
  const auto job = rendezvous_of(kTwoHosts);
  auto network = between_hosts();
  expect_ok(check_interface(job, network, std::nullopt), "eth0 (10.0.0.1)");
  expect_ok(check_interface(rendezvous_of({}), loopback(), std::nullopt), "lo (127.0.0.1)");
  expect_ok(check_interface(job, network, "eth0"), "eth0 (10.0.0.1), selected by LOCKSTEP_INTERFACE");
  expect_error(check_interface(job, network, "ib0"), "\"ib0\"; this host has lo, eth0, eth1", "LOCKSTEP_INTERFACE");
  expect_error(check_interface(job, network, "eth1"), "eth1, which is down", "ip link set eth1 up");
  expect_error(check_interface(job, network, "lo"), "which no other host can reach", "LOCKSTEP_INTERFACE");
  network.interfaces.push_back({"eth2", true, {}});
  expect_error(check_interface(job, network, "eth2"), "has no address", "give it an address");
  network.interfaces.push_back({"docker0", true, {"172.17.0.1"}});
  network.local = "172.17.0.1";
  expect_warning(check_interface(job, network, std::nullopt), "docker0", "LOCKSTEP_INTERFACE");
}

TEST(Doctor, JudgesThePort) {
  auto variables = kTwoHosts;
  auto network = between_hosts();
  expect_ok(check_port(rendezvous_of(variables), network), "29500, free");
  network.bind_failure = "Address already in use";
  expect_error(check_port(rendezvous_of(variables), network), "cannot listen on 29500 (MASTER_PORT)",
               "ss -ltnp 'sport = :29500'");
  expect_warning(check_port(rendezvous_of({}), network), "29500 (the default)", "set MASTER_PORT");
  variables["MASTER_PORT"] = "80";
  network.bind_failure = "Permission denied";
  expect_error(check_port(rendezvous_of(variables), network), "80 (MASTER_PORT)", "from 1024 to 32767");
  variables["RANK"] = "1";
  variables["LOCAL_RANK"] = "1";
  expect_ok(check_port(rendezvous_of(variables), network), "rank 0 listens");
  variables["LOCKSTEP_STORE_HOSTED"] = "1";
  expect_ok(check_port(rendezvous_of(variables), network), "the launcher listens");
  expect_error(check_port(rendezvous_of({{"LOCKSTEP_JOB_ID", "a"}}), network), "(derived from the job's name)",
               "set MASTER_PORT");
  network.bind_failure.clear();
  expect_ok(check_port(rendezvous_of({{"LOCKSTEP_JOB_ID", "a"}}), network), ", derived from the job's name, free");
}

TEST(Doctor, WarnsOfPortsThatTheSystemGivesAway) {
  auto network = between_hosts();
  for (const auto& [port, status] : std::map<std::string, Status>{
           {"32767", Status::kOk}, {"32768", Status::kWarning}, {"60999", Status::kWarning}, {"61000", Status::kOk}}) {
    const auto finding = check_port(rendezvous_of({{"MASTER_PORT", port}}), network);
    EXPECT_EQ(finding.status, status) << port;
  }
  expect_warning(check_port(rendezvous_of({{"MASTER_PORT", "40000"}}), network), "32768 to 60999", "1024 to 32767");
  network.is_rendezvous_host = false;
  expect(check_port(rendezvous_of({{"MASTER_PORT", "29500"}}), network), Status::kOk, "on another host",
         "on that host too");
}

TEST(Network, FindsThatAPortIsTaken) {
  const int taken = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof address;
  ASSERT_EQ(::bind(taken, reinterpret_cast<sockaddr*>(&address), bytes), 0);
  ASSERT_EQ(::getsockname(taken, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
  ASSERT_EQ(::listen(taken, 1), 0);
  const auto rendezvous =
      rendezvous_of({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", std::to_string(ntohs(address.sin_port))}});
  auto network = read_network(rendezvous);
  EXPECT_TRUE(network.is_rendezvous_host);
  EXPECT_EQ(network.local, "127.0.0.1");
  EXPECT_EQ(network.bind_failure, "Address already in use");
  ::close(taken);
  network = read_network(rendezvous);
  EXPECT_EQ(network.bind_failure, "");
}

TEST(Network, KnowsThatANameDoesNotResolve) {
  const auto network = read_network(rendezvous_of({{"MASTER_ADDR", "nowhere.invalid"}}));
  EXPECT_TRUE(network.rendezvous.addresses.empty());
  EXPECT_NE(network.rendezvous.failure, "");
  EXPECT_FALSE(network.is_rendezvous_host);
}

TEST(Doctor, JudgesFolders) {
  const Folder good{"checkpoints", "/data", "--checkpoint-dir", "", true, {kGibibyte, kGibibyte}};
  expect_ok(check_folder(good), "/data, 1 GiB free");
  auto folder = good;
  folder.space.free_bytes = 255 * kMebibyte;
  expect_warning(check_folder(folder), "255 MiB free",
                 "free some space there, or choose another folder with --checkpoint-dir");
  folder.failure = "Read-only file system";
  expect_error(check_folder(folder), "/data cannot be written: Read-only file system", "write permission for /data");
  folder.exists = false;
  expect_error(check_folder(folder), "/data cannot be written", "mkdir -p /data");
  folder.purpose = kFlightRecorder;
  expect_warning(check_folder(folder), "/data cannot be written", "mkdir -p /data");
}

TEST(Folders, AreTriedAndLeftAsTheyWere) {
  TemporaryFolder folder;
  const auto rendezvous = rendezvous_of({{"LOCKSTEP_INIT_METHOD", "file:///nowhere/job"}});
  const auto folders = try_folders(lookup_in({{"TMPDIR", folder.path()}, {"LOCKSTEP_FLIGHT_DIR", "/nowhere"}}),
                                   rendezvous, folder.path() / "sub");
  ASSERT_EQ(folders.size(), 4U);
  EXPECT_EQ(folders[0].failure, "");
  EXPECT_GT(folders[0].space.total_bytes, 0U);
  for (size_t missing = 1; missing < 4; ++missing) {
    EXPECT_EQ(folders[missing].failure, "No such file or directory") << folders[missing].purpose;
    EXPECT_FALSE(folders[missing].exists);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_EQ(try_folders(lookup_in({}), rendezvous_of({}), std::nullopt)[0].path, "/tmp");
}

}  // namespace
}  // namespace lockstep::tool
