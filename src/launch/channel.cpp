#include "launch/channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr size_t kMaxFiles = 8;  // per message

}  // namespace

std::pair<FileDescriptor, FileDescriptor> Channel::make_ends() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw SystemError(text("socketpair: ", std::strerror(errno)));
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

short Channel::events() const {
  return static_cast<short>(has_unsent() ? POLLIN | POLLOUT : POLLIN);
}

void Channel::send(const Fields& fields, std::vector<FileDescriptor> files) {
  unsent_.push_back({encode({Verb::kSet, 0, fields}), std::move(files)});
  flush();
}

void Channel::flush() {
  while (!unsent_.empty()) {
    Unsent& message = unsent_.front();
    const ssize_t put = send_some(message);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && errno == EAGAIN) return;
    if (put < 0 && (errno == EPIPE || errno == ECONNRESET)) return unsent_.clear();  // read_some() reports it
    if (put < 0)
      throw SystemError(text("sendmsg between the launcher and its supervisor: ", std::strerror(errno),
                             "; raise the limit of open files (ulimit -n), or free memory"));
    message.sent += static_cast<size_t>(put);
    message.files.clear();
    if (message.sent == message.bytes.size()) unsent_.pop_front();
  }
}

ssize_t Channel::send_some(const Unsent& unsent) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFiles)] = {};
  iovec part{const_cast<char*>(unsent.bytes.data()) + unsent.sent, unsent.bytes.size() - unsent.sent};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!unsent.files.empty()) {
    std::vector<int> files;
    for (const auto& file : unsent.files) files.push_back(file.get());
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * files.size());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * files.size());
    std::memcpy(CMSG_DATA(header), files.data(), sizeof(int) * files.size());
  }
  return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

bool Channel::read_some() {
  std::array<char, 16 << 10> bytes;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFiles)];
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
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
    throw SystemError(
        "the supervisor did not receive a worker's output pipes; raise the limit of open files (ulimit -n)");
  FileDescriptor first = std::move(files_.front());
  files_.erase(files_.begin());
  return first;
}

}  // namespace lockstep
