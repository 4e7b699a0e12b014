#pragma once

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

/// Expects `call` to throw an `Error` of this kind whose message contains every one of `parts`.
template <class Error, class Call, class... Parts>
void expect_error(Call&& call, const Parts&... parts) {
  try {
    call();
    ADD_FAILURE() << "no error was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(std::string(error.what()), testing::AllOf(testing::HasSubstr(parts)...));
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another kind of error was thrown: " << error.what();
  }
}
