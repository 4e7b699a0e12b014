// Preloaded by loaded_torch_test: says what a LibTorch of another release would say of itself.

#include <map>
#include <string>

namespace caffe2 {

const std::map<std::string, std::string>& GetBuildOptions() {
  static const std::map<std::string, std::string> options{{"TORCH_VERSION", "0.4.1"}};
  return options;
}

}  // namespace caffe2
