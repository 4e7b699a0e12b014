#include <lockstep/lmdb.h>

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/data_loader.h>
#include <lockstep/error.h>

#include "support/messages.h"
#include "support/temporary_folder.h"

#ifdef LOCKSTEP_HAVE_LMDB
#include <lmdb.h>
#endif

namespace lockstep {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::data::Example;

class Lmdb : public testing::Test {
 protected:
  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) names.insert(entry.path().filename());
    return names;
  }

  TemporaryFolder folder_;
  const std::filesystem::path file_ = folder_.path() / "samples.lmdb";
};

#ifdef LOCKSTEP_HAVE_LMDB

std::pair<std::string, std::string> record(const LmdbReader& reader, size_t index) {
  std::pair<std::string, std::string> read;
  reader.read(index, [&](std::string_view key, std::string_view value) {
    read = {std::string(key), std::string(value)};
  });
  return read;
}

// A database as others write it.
void write_with_keys(const std::filesystem::path& path, unsigned flags, const std::vector<std::string>& keys,
                     unsigned database_flags = 0) {
  MDB_env* environment = nullptr;
  MDB_txn* transaction = nullptr;
  MDB_dbi database = 0;
  ASSERT_EQ(mdb_env_create(&environment), 0);
  ASSERT_EQ(mdb_env_open(environment, path.c_str(), flags, 0644), 0);
  ASSERT_EQ(mdb_txn_begin(environment, nullptr, 0, &transaction), 0);
  ASSERT_EQ(mdb_dbi_open(transaction, nullptr, database_flags, &database), 0);
  for (auto key : keys) {
    MDB_val name{key.size(), key.data()}, value{key.size(), key.data()};
    ASSERT_EQ(mdb_put(transaction, database, &name, &value, 0), 0);
    if (database_flags & MDB_DUPSORT) {
      MDB_val another{1, key.data()};
      ASSERT_EQ(mdb_put(transaction, database, &name, &another, 0), 0);
    }
  }
  ASSERT_EQ(mdb_txn_commit(transaction), 0);
  mdb_env_close(environment);
}

TEST_F(Lmdb, HandsBackWhatWasWritten) {
  LmdbWriter writer(file_);
  for (int64_t i = 0; i < 300; ++i)
    writer.add(Example<>(torch::full({2, 3}, i % 251, torch::kByte), torch::tensor(-i)));
  EXPECT_EQ(writer.size(), 300u);
  EXPECT_FALSE(files().contains("samples.lmdb")) << "not before it is whole";
  writer.finish();
  EXPECT_THAT(files(), ElementsAre("samples.lmdb"));

  LmdbDataset dataset(file_);
  ASSERT_EQ(dataset.size().value(), 300u);
  for (int64_t i : {0, 1, 255, 256, 299}) {
    const auto sample = dataset.get(static_cast<size_t>(i));
    EXPECT_TRUE(torch::equal(sample.data, torch::full({2, 3}, i % 251, torch::kByte)));
    EXPECT_EQ(sample.target.item<int64_t>(), -i);
  }
  EXPECT_THAT(error_of<UsageError>([&] { dataset.get(300); }), HasSubstr("index 300, expected less than 300"));

  DataLoader loader(dataset, DistributedSampler(dataset.size().value(), 0, 1), {.batch_size = 7, .num_workers = 3});
  int64_t sum = 0;
  for (auto& batch : loader) sum += batch.target.sum().item<int64_t>();
  EXPECT_EQ(sum, -299 * 300 / 2);
}

TEST_F(Lmdb, HoldsMoreThanATransactionAndRecordsOfAnySize) {
  std::vector<std::string> values;
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{5000}, size_t{40} << 20, size_t{3}, size_t{200} << 20})
    values.emplace_back(bytes, static_cast<char>('a' + values.size()));
  LmdbWriter writer(file_);
  for (const auto& value : values) writer.add(value);
  writer.finish();
  LmdbReader reader(file_, {.read_ahead = false});
  ASSERT_EQ(reader.size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(record(reader, i).second == values[i]) << i;
}

TEST_F(Lmdb, ReadsWhatOthersWrote) {
  const std::vector<std::string> keys{"b", "a", "00000010", "0000000x"};
  write_with_keys(file_, MDB_NOSUBDIR, keys);
  LmdbReader reader(file_);
  ASSERT_EQ(reader.size(), 4u);
  EXPECT_EQ(record(reader, 1), std::pair(std::string("00000010"), std::string("00000010")));
  EXPECT_EQ(record(reader, 3).first, "b");

  const auto several = folder_.path() / "several_values_to_a_key";
  write_with_keys(several, MDB_NOSUBDIR, {"one", "two"}, MDB_DUPSORT);
  EXPECT_EQ(LmdbReader(several).size(), 2u);
  EXPECT_EQ(record(LmdbReader(several), 1).second, "t");

  const auto folder = folder_.path() / "as_a_folder";
  std::filesystem::create_directory(folder);
  write_with_keys(folder, 0, {"only"});
  LmdbDataset sizes(folder, [](std::string_view key, std::string_view value) { return key.size() + value.size(); });
  static_assert(std::is_same_v<decltype(sizes), LmdbDataset<size_t>>);
  EXPECT_EQ(sizes.get(0), 8u);
}

TEST_F(Lmdb, IsReadAndWrittenByPythonToo) {
  const std::string python = "/usr/bin/python3";  // Debian's packages belong to it
  if (std::system((python + " -c 'import lmdb, numpy' 2>/dev/null").c_str()) != 0)
    GTEST_SKIP() << "needs Python's lmdb and numpy: apt-get install python3-lmdb python3-numpy";
  LmdbWriter writer(file_);
  for (int i = 0; i < 20; ++i) writer.add({torch::full({2, 3}, double(i), torch::kFloat), torch::tensor(i)});
  writer.finish();
  const auto said = folder_.path() / "said", theirs = folder_.path() / "theirs";
  const std::string command = python + " " + LOCKSTEP_TEST_SOURCE_DIR + "/data/lmdb_oracle.py " + file_.string() + " " +
                              theirs.string() + " >" + said.string();
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
  std::string line;
  std::getline(std::ifstream(said), line);
  EXPECT_EQ(line, "20 1140.0");

  LmdbDataset dataset(theirs);
  ASSERT_EQ(dataset.size().value(), 12u);
  for (int64_t i = 0; i < 12; ++i)
    EXPECT_TRUE(torch::equal(dataset.get(static_cast<size_t>(i)).data, torch::full({3}, i, torch::kLong)));
}

TEST_F(Lmdb, LeavesNothingUnlessItIsFinished) {
  {
    LmdbWriter writer(file_);
    writer.add("a record");
    EXPECT_EQ(files().size(), 1u);
  }
  EXPECT_TRUE(files().empty());
}

TEST_F(Lmdb, PublishesNothingWhenAWriteHasFailed) {
  struct rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto ignored = ::signal(SIGXFSZ, SIG_IGN);
  LmdbWriter writer(file_);
  const std::string value(1 << 20, 'x');
  const struct rlimit full { 8 << 20, before.rlim_max };
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  const auto error = error_of<Error>([&] {
    for (int i = 0; i < 100; ++i) writer.add(value);
  });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, ignored);
  EXPECT_THAT(error, HasSubstr("mdb_txn_commit"));
  EXPECT_THAT(error_of<UsageError>([&] { writer.add(value); }), HasSubstr("an earlier write failed"));
  EXPECT_THAT(error_of<UsageError>([&] { writer.finish(); }), HasSubstr("start again with a new writer"));
  EXPECT_FALSE(files().contains("samples.lmdb"));
}

TEST_F(Lmdb, OverwritesNothing) {
  LmdbWriter first(file_);
  auto second = std::make_unique<LmdbWriter>(file_);
  first.add("first");
  second->add("second");
  first.finish();
  const auto error = error_of<SystemError>([&] { second->finish(); });
  EXPECT_THAT(error_of<UsageError>([&] { second->finish(); }), HasSubstr("an earlier write failed"));
  second.reset();
  EXPECT_THAT(error, AllOf(HasSubstr("File exists"), HasSubstr("all added records are in")));
  EXPECT_EQ(record(LmdbReader(file_), 0).second, "first");
  EXPECT_EQ(files().size(), 2u) << "what the second wrote is not lost";
  EXPECT_THAT(error_of<UsageError>([&] { LmdbWriter third(file_); }), HasSubstr("exists already"));
  EXPECT_THAT(error_of<UsageError>([&] { first.add("more"); }), HasSubstr("is finished"));
  EXPECT_NO_THROW(first.finish());
}

TEST_F(Lmdb, RefusesWhatIsNoWholeDatabase) {
  EXPECT_THAT(error_of<UsageError>([&] { LmdbReader reader(file_); }), HasSubstr("No such file or directory"));
  std::ofstream(file_) << std::string(10000, 'x');
  EXPECT_THAT(error_of<UsageError>([&] { LmdbReader reader(file_); }), HasSubstr("not an LMDB file"));
  ::unlink(file_.c_str());
  std::ofstream(file_).flush();
  EXPECT_THAT(error_of<UsageError>([&] { LmdbReader reader(file_); }), HasSubstr("is not a database"));
  ::unlink(file_.c_str());
  EXPECT_THAT(error_of<UsageError>([&] { LmdbReader reader(folder_.path()); }), HasSubstr("data.mdb"));

  LmdbWriter writer(file_);
  for (int i = 0; i < 100; ++i) writer.add(std::string(4000, 'a'));
  writer.finish();
  const auto bytes = std::filesystem::file_size(file_);
  ASSERT_EQ(::truncate(file_.c_str(), static_cast<off_t>(bytes - 1)), 0);
  EXPECT_THAT(error_of<UsageError>([&] { LmdbReader reader(file_); }), HasSubstr("is truncated: it has"));
}

TEST_F(Lmdb, RefusesATruncatedDatabaseOfAnySize) {
  LmdbWriter writer(file_);
  for (int i = 0; i < 20; ++i) writer.add(std::string(3000, 'a'));
  writer.finish();
  const auto bytes = static_cast<off_t>(std::filesystem::file_size(file_));
  for (off_t size = bytes - 1; size > 0; size -= 509) {
    ASSERT_EQ(::truncate(file_.c_str(), size), 0);
    EXPECT_NE(error_of<UsageError>([&] { LmdbReader reader(file_); }), "no such error") << size << " of " << bytes;
  }
}

// A size in a page is wrong. Other records can be read.
TEST_F(Lmdb, RefusesARecordThatReachesBeyondTheEndOfTheFile) {
  LmdbWriter writer(file_);
  for (int i = 0; i < 60; ++i) writer.add(std::string(4000, 'a'));
  writer.finish();
  // In LMDB's pages: the size of the value in two halves, flags (it has pages of its own), the size of the key, the
  // key.
  const std::string size{'\xa0', '\x0f', 0, 0}, rest{1, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 50};
  std::ifstream in(file_, std::ios::binary);
  std::string content{std::istreambuf_iterator<char>(in), {}};
  size_t found = 0;
  for (size_t at = 0; (at = content.find(size + rest, at)) != content.npos; ++at, ++found) content[at + 3] = '\x7f';
  ASSERT_GT(found, 0u);
  std::ofstream(file_, std::ios::binary) << content;
  LmdbReader reader(file_);
  ASSERT_EQ(reader.size(), 60u);
  EXPECT_THAT(error_of<UsageError>([&] { record(reader, 50); }),
              AllOf(HasSubstr("is damaged: a record of 2130710432 bytes"), HasSubstr("beyond the end of the file")));
  EXPECT_EQ(record(reader, 49).second, std::string(4000, 'a'));
  EXPECT_EQ(record(reader, 51).second, std::string(4000, 'a'));
}

TEST_F(Lmdb, SaysWhatARecordLacks) {
  LmdbWriter writer(file_);
  writer.add("no tensors");
  writer.add(Example<>(torch::ones({2}), at::Tensor()));
  writer.finish();
  LmdbDataset dataset(file_);
  EXPECT_THAT(error_of<UsageError>([&] { dataset.get(0); }), HasSubstr("not valid safetensors"));
  EXPECT_FALSE(dataset.get(1).target.defined());
  EXPECT_EQ(Stack()(std::vector{dataset.get(1), dataset.get(1)}).data.sizes(), (std::vector<int64_t>{2, 2}));
}

#else

TEST_F(Lmdb, IsRefusedWhereItIsNotBuiltIn) {
  EXPECT_THAT(error_of<UsageError>([&] { LmdbDataset dataset(file_); }), HasSubstr("install liblmdb-dev"));
  EXPECT_THAT(error_of<UsageError>([&] { LmdbWriter writer(file_); }), HasSubstr("install liblmdb-dev"));
}

#endif

}  // namespace
}  // namespace lockstep
