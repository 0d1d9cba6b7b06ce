"""Operations of a CPU in C++, built where they run."""
