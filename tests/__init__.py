"""The test suite. It is a package, so that tests and worker processes import tests.helpers under the same name."""
