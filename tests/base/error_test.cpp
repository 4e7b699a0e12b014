#include "base/error.h"

#include <gtest/gtest.h>

#include <lockstep/error.h>

namespace lockstep {
namespace {

template <class Kind>
void keeps_its_kind() {
  try {
    rethrow_with_prefix(std::make_exception_ptr(Kind("broken")), "rank 1: ");
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rank 1: broken");
    EXPECT_EQ(typeid(error), typeid(Kind));
  }
}

TEST(Rethrow, ErrorsKeepTheirKind) {
  keeps_its_kind<UsageError>();
  keeps_its_kind<PeerError>();
  keeps_its_kind<TimeoutError>();
  keeps_its_kind<MismatchError>();
  keeps_its_kind<CheckpointError>();
  keeps_its_kind<SystemError>();
}

TEST(ErrorKind, HasTheNameOfTheClassAndIsReadBackFromIt) {
  EXPECT_STREQ(name_of(Error("").kind()), "Error");
  EXPECT_STREQ(name_of(UsageError("").kind()), "UsageError");
  EXPECT_STREQ(name_of(PeerError("").kind()), "PeerError");
  EXPECT_STREQ(name_of(TimeoutError("").kind()), "TimeoutError");
  EXPECT_STREQ(name_of(MismatchError("").kind()), "MismatchError");
  EXPECT_STREQ(name_of(CheckpointError("").kind()), "CheckpointError");
  EXPECT_STREQ(name_of(SystemError("").kind()), "SystemError");
  for (auto kind : {ErrorKind::kError, ErrorKind::kUsage, ErrorKind::kPeer, ErrorKind::kTimeout, ErrorKind::kMismatch,
                    ErrorKind::kCheckpoint, ErrorKind::kSystem}) {
    EXPECT_EQ(parse_error_kind(name_of(kind)), kind);
    try {
      throw_error(kind, "broken");
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << name_of(kind);
      EXPECT_STREQ(error.what(), "broken");
    }
  }
  EXPECT_EQ(parse_error_kind("OtherError"), std::nullopt);
}

TEST(Error, NamesTheRankInItsMessageAndAsData) {
  const UsageError error(3, "the batch is empty");
  EXPECT_STREQ(error.what(), "rank 3: the batch is empty");
  EXPECT_EQ(error.rank(), 3);
  EXPECT_EQ(error.culprit(), std::nullopt);
  EXPECT_EQ(UsageError("the batch is empty").rank(), std::nullopt);
}

TEST(Rethrow, ErrorsKeepTheirCulpritAndTakeTheRankOfThePrefix) {
  const Culprit culprit{2, CulpritRole::kLeft};
  const auto error = std::make_exception_ptr(PeerError("rank 2 has left", 0, culprit));
  for (const auto& [given, expected] : {std::pair<std::optional<int>, int>{1, 1}, {std::nullopt, 0}}) {
    try {
      rethrow_with_prefix(error, "rank 1: ", "", given);
    } catch (const PeerError& again) {
      EXPECT_STREQ(again.what(), "rank 1: rank 2 has left");
      EXPECT_EQ(again.rank(), expected);
      EXPECT_EQ(again.culprit(), culprit);
    }
  }
  EXPECT_EQ(rank_of(error), 0);
  EXPECT_EQ(culprit_of(error), culprit);
  EXPECT_EQ(culprit_of(std::make_exception_ptr(std::out_of_range("far"))), std::nullopt);
}

TEST(Rethrow, ASecondPassKeepsWhatTheFirstHasNested) {
  std::exception_ptr once;
  try {
    rethrow_with_prefix(std::make_exception_ptr(std::out_of_range("far")), "all_reduce: ");
  } catch (...) {
    once = std::current_exception();
  }
  try {
    rethrow_with_prefix(once, "rank 1: ");
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rank 1: all_reduce: far");
    try {
      std::rethrow_if_nested(error);
      FAIL() << "nothing is nested";
    } catch (const Error& inner) {
      EXPECT_THROW(std::rethrow_if_nested(inner), std::out_of_range);
    }
  }
}

TEST(Rethrow, ForeignExceptionsAreNested) {
  try {
    rethrow_with_prefix(std::make_exception_ptr(std::out_of_range("far")), "rank 1: ");
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rank 1: far");
    EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
  }
  try {
    rethrow_with_prefix(std::make_exception_ptr(42), "rank 1: ");
  } catch (const Error& error) {
    EXPECT_THROW(std::rethrow_if_nested(error), int);
  }
}

TEST(Error, NamesARankOnce) {
  EXPECT_STREQ(UsageError(3, "rank 3: the batch is empty").what(), "rank 3: the batch is empty");
  EXPECT_STREQ(UsageError(3, "rank 1: the batch is empty").what(), "rank 3: rank 1: the batch is empty");
  EXPECT_STREQ(UsageError(3, "rank 3 has: nothing").what(), "rank 3: rank 3 has: nothing");
  EXPECT_EQ(without_rank("rank 12: no data"), "no data");
  EXPECT_EQ(without_rank("rank 12: no data", 12), "no data");
  EXPECT_EQ(without_rank("rank 12: no data", 1), "rank 12: no data");
  EXPECT_EQ(without_rank("rank x: no data"), "rank x: no data");
  EXPECT_EQ(without_rank("rank 12"), "rank 12");
  EXPECT_EQ(without_rank(""), "");
}

TEST(Rethrow, NamesTheRankOfThePrefixOnce) {
  const auto what = [](const std::string& prefix, std::optional<int> rank) {
    try {
      rethrow_with_prefix(std::make_exception_ptr(UsageError(1, "no data")), prefix, "", rank);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_EQ(what("rank 1: sample 7: ", 1), "rank 1: sample 7: no data");
  EXPECT_EQ(what("rank 0: sample 7: ", 0), "rank 0: sample 7: rank 1: no data");
  EXPECT_EQ(what("sample 7: ", {}), "sample 7: rank 1: no data");
  // Rank 1 of a subgroup is another rank than rank 1 of the job.
  EXPECT_EQ(what("rank 1 of group 'odd' (rank 3 of the job): ", 1),
            "rank 1 of group 'odd' (rank 3 of the job): rank 1: no data");
}

}  // namespace
}  // namespace lockstep
