// A forked child has copies of our memory, but none of our threads, and locks as they happened to
// be: it must neither wait for anything nor speak in its parent's name.
#pragma once

namespace jaxring {

void watch_forks();  // from now on; again: nothing happens

// Whether this process was forked from one that had called watch_forks().
bool forked();

}  // namespace jaxring
