// Feeds anything to what stands between the network and the job's store. Whoever knows the secret may break the
// language, which ends its connection; nobody may crash the store or make it throw anything else.

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

#include "rendezvous/net/tls.h"
#include "rendezvous/store/coordinator.h"

namespace {

using namespace lockstep;

/// Reads the input as a script.
class Script {
 public:
  Script(const uint8_t* data, size_t size) : bytes_(reinterpret_cast<const char*>(data), size) {}

  bool is_over() const { return bytes_.empty(); }
  uint8_t byte() { return is_over() ? 0 : static_cast<uint8_t>(take(1)[0]); }
  std::string_view take(size_t size) {
    auto taken = bytes_.substr(0, size);
    bytes_.remove_prefix(taken.size());
    return taken;
  }

 private:
  std::string_view bytes_;
};

void require(bool claim) {
  if (!claim) std::abort();
}

/// Plays a script of several connections: what each says, in which pieces, at which time, and which are lost.
class Store {
 public:
  void play(Script& script) {
    for (uint64_t name = 1; name <= kConnections; ++name) connect(name);
    while (!script.is_over()) {
      step(script);
      deliver();
    }
    now_ += std::chrono::hours(1);  // whatever is still open must come to its end
    coordinator_.tick(now_);
    deliver();
  }

 private:
  static constexpr uint64_t kConnections = 4;

  void connect(uint64_t name) {
    decoders_[name] = {};
    coordinator_.connected(name);
  }

  void lose(uint64_t name) {
    coordinator_.lost(name, "its connection was closed", now_);
    connect(name);
  }

  // The first byte: two bits for the connection, three for what happens, three for how much time passes.
  void step(Script& script) {
    const uint8_t what = script.byte();
    const uint64_t name = 1 + (what & 3);
    now_ += std::chrono::milliseconds((what >> 5) * (what >> 5) * 25);
    switch ((what >> 2) & 7) {
      case 0:
        return lose(name);
      case 1:
        return coordinator_.tick(now_);
      case 2:
        return coordinator_.reset_heartbeats(now_);
      case 3:
        return hear(name, encode(compose(script)));
      default:
        return hear(name, script.take(script.byte()));
    }
  }

  // A message whose form is right: verb, id, and fields with their lengths.
  static StoreMessage compose(Script& script) {
    StoreMessage message{static_cast<Verb>(script.byte() % 60), script.byte(), {}};
    for (size_t left = script.byte() % 9; left > 0; --left) message.fields.push_back(field(script));
    return message;
  }

  // A word that the store knows, or any bytes.
  static std::string field(Script& script) {
    static const std::vector<std::string> words{
        "rank/0", "rank/1",  "0",       "1",      "2", "500", "-1", "9223372036854775807",
        "world",  "symptom", "certain", "traced", ""};
    const uint8_t which = script.byte();
    return which < 128 ? words[which % words.size()] : std::string(script.take(which % 32));
  }

  void hear(uint64_t name, std::string_view bytes) {
    try {
      decoders_[name].feed(bytes);
      while (auto message = decoders_[name].next()) coordinator_.received(name, *message, now_);
    } catch (const ProtocolError&) {
      lose(name);
    }
  }

  // What the store says it must understand itself.
  void deliver() {
    for (const auto& [to, message] : coordinator_.take_outgoing()) {
      require(to >= 1 && to <= kConnections);
      Decoder decoder;
      decoder.feed(encode(message));
      require(decoder.next() == message);
    }
    require(coordinator_.members() <= kConnections);
  }

  Coordinator::Time now_{std::chrono::hours(1)};
  Coordinator coordinator_{{"rank 0", {"node0", "boot", 4000}, 0}};
  std::map<uint64_t, Decoder> decoders_;
};

void unpack_anything(std::string_view bytes) {
  try {
    require(pack(unpack(bytes)) == bytes);
  } catch (const ProtocolError&) {
  }
}

/// As the store hears one who knows nothing, or who changes the words of one who does: neither is ever taken in.
void play_stranger(Script& script) {
  static const TlsContext server_context(TlsContext::Side::kServer, "name", Secret::from_bytes(std::string(32, 'k')));
  static const TlsContext client_context(TlsContext::Side::kClient, "name", Secret::from_bytes(std::string(32, 'k')));
  TlsSession session(server_context);
  session.send("for ranks only");
  try {
    if (script.byte() % 2 == 0) {
      auto hello = TlsSession(client_context).take_output();
      for (size_t changes = script.byte() % 4; changes > 0; --changes)
        hello[static_cast<size_t>(script.byte() << 8 | script.byte()) % hello.size()] ^=
            static_cast<char>(script.byte());
      session.receive(hello);
    }
    while (!script.is_over()) {
      session.receive(script.take(1 + script.byte()));
      session.take_output();
    }
  } catch (const TlsError&) {
  }
  require(!session.is_authenticated());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Script script(data, size);
  if (script.is_over()) return 0;
  switch (script.byte() % 8) {
    case 0:
      play_stranger(script);
      break;
    case 1:
      unpack_anything(script.take(size));
      break;
    default:
      Store().play(script);
  }
  return 0;
}
