#include "launch/channel.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr size_t kMostFiles = 8;  // with one message

}  // namespace

std::pair<FileDescriptor, FileDescriptor> Channel::make_ends() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw SystemError(text("socketpair: ", std::strerror(errno)));
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

bool Channel::send(const Fields& fields, const std::vector<int>& files) {
  std::string bytes = encode({Verb::kSet, 0, fields});
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostFiles)] = {};
  bool with_files = !files.empty();
  for (size_t sent = 0; sent < bytes.size();) {
    iovec part{bytes.data() + sent, bytes.size() - sent};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (with_files) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(sizeof(int) * files.size());
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int) * files.size());
      std::memcpy(CMSG_DATA(header), files.data(), sizeof(int) * files.size());
    }
    ssize_t put = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return false;
    sent += static_cast<size_t>(put);
    with_files = false;  // they went with the first byte
  }
  return true;
}

bool Channel::read_some(bool wait) {
  std::array<char, 16 << 10> bytes;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostFiles)];
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | (wait ? 0 : MSG_DONTWAIT));
  if (got < 0) return errno == EINTR || errno == EAGAIN;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int file = -1;
      std::memcpy(&file, CMSG_DATA(header) + i * sizeof(int), sizeof file);
      files_.emplace_back(file);
    }
  }
  if (got == 0) return false;
  decoder_.feed({bytes.data(), static_cast<size_t>(got)});
  return true;
}

std::optional<Channel::Fields> Channel::next() {
  auto message = decoder_.next();
  if (!message) return std::nullopt;
  return std::move(message->fields);
}

FileDescriptor Channel::take_file() {
  if (files_.empty())
    throw SystemError("a worker's output could not be handed over; raise the limit of open files (ulimit -n)");
  FileDescriptor first = std::move(files_.front());
  files_.erase(files_.begin());
  return first;
}

}  // namespace lockstep
