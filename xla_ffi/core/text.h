// Texts that people give and that others read: in XLA's status, as Python's str, on a line of a
// log.
#pragma once

#include <string>

namespace jaxring {

// `position`, or the beginning of the UTF-8 character that lies across it: half a character is no
// text for Python, which then raises UnicodeDecodeError in place of the error.
inline size_t character_boundary(const std::string& text, size_t position) {
  if (position >= text.size()) return text.size();
  while (position > 0 && (static_cast<unsigned char>(text[position]) & 0xC0) == 0x80) --position;
  return position;
}

inline std::string first_bytes(const std::string& text, size_t bytes) {
  return text.substr(0, character_boundary(text, bytes));
}

// Errors are found again in XLA's text by their line, and a status ends at a NUL.
inline std::string on_one_line(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  }
  return text;
}

}  // namespace jaxring
