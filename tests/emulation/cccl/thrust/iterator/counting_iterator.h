// thrust::counting_iterator on the host: consecutive numbers from a first one on.
#pragma once

namespace thrust {

template <class T>
class counting_iterator {
 public:
  explicit counting_iterator(T first) : first_(first) {}
  T operator*() const { return first_; }
  T operator[](T i) const { return first_ + i; }
  counting_iterator operator+(T i) const { return counting_iterator(first_ + i); }

 private:
  T first_;
};

template <class T>
counting_iterator<T> make_counting_iterator(T first) {
  return counting_iterator<T>(first);
}

}  // namespace thrust
