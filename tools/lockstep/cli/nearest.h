#pragma once

#include <string>
#include <vector>

/// The one of `known` that `written` was most likely meant to be; empty when none is near.
std::string nearest(const std::string& written, const std::vector<std::string>& known);

/// " Did you mean NEAREST?", or nothing.
std::string suggestion(const std::string& written, const std::vector<std::string>& known);
