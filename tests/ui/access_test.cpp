#include "ui/access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::ui {
namespace {

TEST(Access, TokensAreLongAndDiffer) {
  const auto token = random_token();
  EXPECT_THAT(token, testing::MatchesRegex("[0-9a-f]{32}"));
  EXPECT_NE(token, random_token());
}

TEST(Access, ComparesWholeTexts) {
  EXPECT_TRUE(equal_in_constant_time("abc", "abc"));
  for (const auto* other : {"", "ab", "abcd", "abd", "xbc", "aBc"}) EXPECT_FALSE(equal_in_constant_time("abc", other));
}

TEST(Access, KnowsItsHostByAddressesAndOwnNamesOnly) {
  const Access access("t", "node7.example.org", 8080);
  for (const auto* own : {"127.0.0.1:8080", "localhost:8080", "LOCALHOST", "[::1]:8080", "192.168.1.7:8080",
                          "127.0.0.1:9999", "node7.example.org:8080"})
    EXPECT_TRUE(access.is_own_host(own)) << own;
  for (const auto* foreign : {"", "evil.example", "evil.example:8080", "127.0.0.1.evil.example:8080", "localhost.evil",
                              ":8080", "1.2.3", "0x7f000001:8080", "[evil]:8080"})
    EXPECT_FALSE(access.is_own_host(foreign)) << foreign;
}

TEST(Access, FindsTheTokenAmongOtherCookies) {
  const Access access("secret", "127.0.0.1", 8080);
  EXPECT_TRUE(access.has_cookie("lockstep_8080=secret"));
  EXPECT_TRUE(access.has_cookie("a=b; lockstep_8080=secret; c=d"));
  EXPECT_TRUE(access.has_cookie("lockstep_8080=old; lockstep_8080=secret"));
  for (const auto* other : {"", "lockstep_8080=", "lockstep_8080=secrets", "lockstep_9090=secret", "secret",
                            "xlockstep_8080=secret", ";;;", "lockstep_8080=Secret"})
    EXPECT_FALSE(access.has_cookie(other)) << other;
  EXPECT_TRUE(access.has_bearer_token("Bearer secret"));
  EXPECT_FALSE(access.has_bearer_token("Basic secret"));
  EXPECT_FALSE(access.has_bearer_token("Bearer "));
}

TEST(Access, SetsACookieThatScriptsAndOtherSitesDoNotSee) {
  EXPECT_EQ(Access("secret", "127.0.0.1", 8080).cookie(), "lockstep_8080=secret; Path=/; HttpOnly; SameSite=Strict");
}

}  // namespace
}  // namespace lockstep::ui
