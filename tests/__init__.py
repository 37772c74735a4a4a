"""The test suite. A package, so that tests and worker processes import tests.helpers by one name."""
