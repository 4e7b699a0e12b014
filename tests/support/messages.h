#pragma once

#include <exception>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

/// Returns the message of the `Error` that `call` throws, or "no such error".
template <class Error, class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no such error";
}

/// Expects `call` to throw an `Error` whose message contains all of `parts`.
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

/// Whether an exception is a `Kind`, or has one nested at any depth.
template <class Kind>
bool holds(const std::exception& error) {
  if (dynamic_cast<const Kind*>(&error)) return true;
  try {
    std::rethrow_if_nested(error);
    return false;
  } catch (const std::exception& nested) {
    return holds<Kind>(nested);
  }
}
