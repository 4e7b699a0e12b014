void remove() {
  std::filesystem::remove_all("folder");
}
