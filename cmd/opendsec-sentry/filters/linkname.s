// This file lets the package declare a function that is another package's.
