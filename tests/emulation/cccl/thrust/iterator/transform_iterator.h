// thrust::transform_iterator on the host: a function's results on another iterator's items.
#pragma once
#include <cstdint>

namespace thrust {

template <class F, class Base>
class transform_iterator {
 public:
  transform_iterator(Base base, F f) : base_(base), f_(f) {}
  auto operator[](int64_t i) const { return f_(base_[i]); }
  auto operator*() const { return f_(*base_); }
  transform_iterator operator+(int64_t i) const { return {base_ + i, f_}; }
  const Base& base() const { return base_; }

 private:
  Base base_;
  F f_;
};

template <class Base, class F>
transform_iterator<F, Base> make_transform_iterator(Base base, F f) {
  return {base, f};
}

}  // namespace thrust
