#include "comm/setup/backend_choice.h"

#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "support/messages.h"

namespace lockstep::detail {
namespace {

using Names = std::vector<std::string>;

const Names kAll{"gloo", "hierarchical", "shm", "threads"};
const Names kWithoutGloo{"shm", "threads"};

TEST(ChooseBackends, OneRankNeedsNobody) {
  EXPECT_EQ(choose_backends({"a"}, kAll), Names{"threads"});
}

TEST(ChooseBackends, OneHostSharesMemoryAndElseTakesGloo) {
  EXPECT_EQ(choose_backends({"a", "a", "a"}, kAll), (Names{"shm", "gloo"}));
  EXPECT_EQ(choose_backends({"a", "a"}, kWithoutGloo), Names{"shm"});
}

TEST(ChooseBackends, SeveralHostsWithSeveralRanksAreAHierarchy) {
  EXPECT_EQ(choose_backends({"a", "a", "b", "b"}, kAll), (Names{"hierarchical", "gloo"}));
  EXPECT_EQ(choose_backends({"a", "b", "a", "b"}, kAll), (Names{"hierarchical", "gloo"})) << "interleaved";
  EXPECT_EQ(choose_backends({"a", "b", "b"}, kAll), (Names{"hierarchical", "gloo"})) << "two ranks on one host suffice";
}

TEST(ChooseBackends, HostsWithOneRankEachTakeGloo) {
  EXPECT_EQ(choose_backends({"a", "b"}, kAll), Names{"gloo"});
  EXPECT_EQ(choose_backends({"a", "b", "c"}, kAll), Names{"gloo"});
}

TEST(ChooseBackends, SeveralHostsWithoutGlooAreToldWhatToInstall) {
  for (const Names& hosts : {Names{"a", "b"}, {"a", "a", "b"}})
    expect_error<UsageError>([&] { choose_backends(hosts, kWithoutGloo); }, "on 2 hosts", "it has shm and threads",
                             "install libgloo-dev");
}

}  // namespace
}  // namespace lockstep::detail
