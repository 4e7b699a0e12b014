#pragma once

#include <string>

namespace lockstep {

/// A secret has at least so many bytes.
inline constexpr size_t kSecretBytes = 32;

/// The whole contents of the file `path`, a newline at the end included. UsageError, naming the path and never the
/// contents, when it is missing, no regular file, someone else's (root's is trusted), open to others than its owner, or
/// shorter than a secret.
std::string read_secret_file(const std::string& path);

/// The same of the file "secret" in `folder`, which is created with the bytes `fresh` when it is missing: folders with
/// mode 0700, the file with 0600 and whole from the start. Of several processes at once, all get the same bytes.
/// UsageError when the folder is someone else's or open to others; SystemError when it cannot be written.
std::string read_or_create_secret_file(const std::string& folder, const std::string& fresh);

}  // namespace lockstep
